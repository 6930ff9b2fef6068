"""Notes: a word for a word, in running text.

Needles in the form in which this project's small checkpoint learned to find them
(``data/retrieval.py``): ``# name is value`` hidden in text, ``? name is`` at the end.
Names and values are words that the tokenizer has in one piece, every other one a name as in
training, so an answer is one token, and all that a model without the right passage can do is guess
among the notes. For models that are too small for the published forms; a released model finds it
easy.
"""

from __future__ import annotations

import random
from itertools import cycle, islice

from sglang_indexcache.errors import QualityError
from sglang_indexcache.evaluate.tasks.context import Asked, Draft, Room, shuffled, strata
from sglang_indexcache.evaluate.tasks.words import haystack

SHORTEST = 3
"""Letters of a name or value: shorter ones stand everywhere in running text."""
_OPENING = "# notes"


def notes(draw: random.Random, room: Room) -> Draft:
    """Notes between the lines of a text, which is repeated if it is too short.

    Raises:
        QualityError: a tokenizer with too few words of one token.
    """
    text = haystack().splitlines()
    begin = draw.randrange(len(text))
    pairs = _pairs(draw, room)
    hidden = [f"# {name} is {value}" for name, value in pairs]
    lines = room.fill(islice(cycle(text), begin, None), beside=[_OPENING, *hidden])
    asked = []
    for number, place in enumerate(strata(draw, room.questions, len(lines) + 1)):
        lines.insert(place + number, hidden[number])
        name, value = pairs[number]
        asked.append(Asked(f"? {name} is", f" {value}", (place + number,)))
    return Draft(_OPENING, lines, shuffled(draw, asked), chat=False)


def _pairs(draw: random.Random, room: Room) -> list[tuple[str, str]]:
    """A name and a value for each question; no value stands inside a name."""
    words = room.words()
    names, values = (
        [word for word in half if len(word) >= SHORTEST] for half in (words[0::2], words[1::2])
    )
    chosen = _sample(draw, names, room.questions)
    others = [word for word in values if not any(word in name for name in chosen)]
    return list(zip(chosen, _sample(draw, others, room.questions), strict=True))


def _sample(draw: random.Random, words: list[str], count: int) -> list[str]:
    if len(words) < count:
        raise QualityError(
            f"notes with {count} questions needs as many one-token words for names and values, and "
            f"the tokenizer has {len(words)}; ask for fewer questions, or for another task"
        )
    return draw.sample(words, count)
