"""Lookup: in which section does a quoted passage stand? One letter of four.

After the form of LongBench v2 (THUDM/LongBench, MIT; Bai et al. 2024, arXiv:2412.15204): a
document, a question, four choices, "The correct answer is (". Different here: the document is cut
from the haystack and the question follows from it alone, so that neither knowledge nor position
helps: sections have random names, the right letter is drawn anew for each question, and the three
other choices are sections of the same document. Guessing has 25 %.
"""

from __future__ import annotations

import random

from sglang_indexcache.errors import QualityError
from sglang_indexcache.evaluate.tasks.context import Asked, Draft, Room, shuffled, strata
from sglang_indexcache.evaluate.tasks.words import ADJECTIVES, NOUNS, names, needs_haystack, windows

LETTERS = "ABCD"
QUOTED = 8
"""Words of the passage."""
_OPENING = "Please read the following text and answer the question below."
_QUESTION = (
    'What is the correct answer to this question: Which section contains the passage "{passage}"?\n'
    "Choices:\n{choices}\nThe correct answer is ("
)


def lookup(draw: random.Random, room: Room, haystack: str) -> Draft:
    """Sections of a text.

    Raises:
        QualityError: a haystack of too few words, or one that repeats itself.
    """
    words = min(256, max(2 * QUOTED, room.tokens // 96))
    needs_haystack("lookup", haystack, 2 * words * room.questions)
    titles = names(draw, len(ADJECTIVES) * len(NOUNS))
    sections = list(zip(titles, windows(draw, haystack, words), strict=False))
    lines = (f"Section {title}: {text}" for title, text in sections)
    taken = room.fill(lines, beside=[_OPENING], least=room.questions)
    del sections[len(taken) :]
    if len(sections) < max(room.questions, len(LETTERS)):
        raise QualityError("the haystack repeats itself too much for lookup; give it other text")
    whole = "\n".join(text for _, text in sections)
    asked, kept = [], set[int]()
    for place in strata(draw, room.questions, len(sections)):
        others = draw.sample([n for n in range(len(sections)) if n != place], len(LETTERS) - 1)
        letter = draw.randrange(len(LETTERS))
        choices = [*others[:letter], place, *others[letter:]]
        kept |= set(choices)
        named = "\n".join(
            f"({letter}) {sections[choice][0]}"
            for letter, choice in zip(LETTERS, choices, strict=True)
        )
        passage = _quote(draw, sections[place][1], whole)
        text = _QUESTION.format(passage=passage, choices=named)
        asked.append(Asked(text, LETTERS[letter], (place,)))
    return Draft(_OPENING, taken, shuffled(draw, asked), frozenset(kept))


def _quote(draw: random.Random, section: str, whole: str) -> str:
    """Some words of the section that stand nowhere else."""
    words = section.split()
    starts = range(len(words) - QUOTED + 1)
    for start in draw.sample(starts, len(starts)):
        passage = " ".join(words[start : start + QUOTED])
        if whole.count(passage) == 1:
            return passage
    raise QualityError("the haystack repeats itself too much for lookup; give it other text")
