"""Needles in running text.

After ``niah_multikey_1`` of RULER (NVIDIA/RULER, Apache-2.0; Hsieh et al. 2024, arXiv:2404.06654):
7 digits for adjective-noun, with its sentences, question and answer prefix. Different here: the
text is the user's, and it is repeated where it is too short, as upstream does; eight needles are
asked for behind one context, at stratified depths, each a distractor of the others, where upstream
asks for one of four; keys are drawn from two lists of our own.
"""

from __future__ import annotations

import random
from itertools import cycle, islice

from sglang_indexcache.evaluate.tasks.context import Draft, Room, shuffled, strata
from sglang_indexcache.evaluate.tasks.needles import NEEDLE, OPENING, asked_for
from sglang_indexcache.evaluate.tasks.words import names, needs_haystack


def needles_text(draw: random.Random, room: Room, haystack: str) -> Draft:
    """Needles between the lines of a text, which is repeated if it is too short.

    Raises:
        QualityError: a haystack without words.
    """
    needs_haystack("needles-text", haystack, 1)
    text = [line for line in haystack.splitlines() if line.strip()]
    begin = draw.randrange(len(text))
    keys = names(draw, room.questions)
    values = draw.sample(range(1_000_000, 10_000_000), room.questions)
    hidden = [
        NEEDLE.format(kind="number", key=key, value=value)
        for key, value in zip(keys, values, strict=True)
    ]
    opening = OPENING.format(kind="number")
    lines = room.fill(islice(cycle(text), begin, None), beside=[opening, *hidden])
    asked = []
    for number, place in enumerate(strata(draw, room.questions, len(lines) + 1)):
        lines.insert(place + number, hidden[number])
        asked.append(asked_for("number", keys[number], str(values[number]), place + number))
    return Draft(opening, lines, shuffled(draw, asked))
