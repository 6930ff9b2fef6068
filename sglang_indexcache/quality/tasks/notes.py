"""Notes: a word for a word, in running text.

Needles in the form in which this project's small checkpoint learned to find them
(``training/data/retrieval.py``): ``# name is value`` hidden in text, ``? name is`` at the end.
Names and values are words that the tokenizer has in one piece, so an answer is one token, and all
that a model without the right passage can do is guess among the notes. For models that are too
small for the published forms; a released model finds it easy.
"""

from __future__ import annotations

import random
import re
from itertools import cycle, islice

from sglang_indexcache.errors import QualityError
from sglang_indexcache.quality.tasks.context import Asked, Draft, Room, shuffled, strata
from sglang_indexcache.quality.tasks.words import needs_haystack

SHORTEST = 3
"""Letters of a word: the shorter ones say little in running text."""
_OPENING = "# notes"


def notes(draw: random.Random, room: Room, haystack: str) -> Draft:
    """Notes between the lines of a text, which is repeated if it is too short.

    Raises:
        QualityError: a haystack with too few words of one token.
    """
    needs_haystack("notes", haystack, 1)
    text = [line for line in haystack.splitlines() if line.strip()]
    begin = draw.randrange(len(text))
    words = _words(room, haystack)
    draw.shuffle(words)
    names, rest = words[: room.questions], words[room.questions :]
    values = [word for word in rest if not any(word in name for name in names)]
    if len(values) < room.questions:
        raise QualityError(
            f"the haystack has {len(words)} words of one token, too few for notes with "
            f"{room.questions} questions; give it more text"
        )
    pairs = list(zip(names, values, strict=False))
    hidden = [f"# {name} is {value}" for name, value in pairs]
    lines = room.fill(islice(cycle(text), begin, None), beside=[_OPENING, *hidden])
    asked = []
    for number, place in enumerate(strata(draw, room.questions, len(lines) + 1)):
        lines.insert(place + number, hidden[number])
        name, value = pairs[number]
        asked.append(Asked(f"? {name} is", f" {value}", (place + number,)))
    return Draft(_OPENING, lines, shuffled(draw, asked))


def _words(room: Room, haystack: str) -> list[str]:
    """Words of the haystack that are one token behind a space, enough for names and values."""
    found = sorted(set(re.findall(rf"[A-Za-z]{{{SHORTEST},}}", haystack)))
    pieces = room.encode([f" {word}" for word in found])
    return [word for word, ids in zip(found, pieces, strict=True) if len(ids) == 1]
