"""Needles: a value among look-alikes.

After ``niah_multikey_3`` of RULER (NVIDIA/RULER, Apache-2.0; Hsieh et al. 2024, arXiv:2404.06654):
uuids for uuids in a haystack of needles, with its sentences, question and answer prefix. Different
here: eight needles are asked for behind one context, at stratified depths.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator

from sglang_indexcache.evaluate.tasks.context import Asked, Draft, Room, shuffled, strata

_OPENING = (
    "Some special magic uuids are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the uuids afterwards."
)
_NEEDLE = "One of the special magic uuids for {key} is: {value}."
_QUESTION = "What is the special magic uuid for {key} mentioned in the provided text?"
_BEGUN = " The special magic uuid for {key} mentioned in the provided text is"


def needles(draw: random.Random, room: Room, haystack: str) -> Draft:
    """A haystack that is made of needles."""
    del haystack
    pairs: list[tuple[str, str]] = []

    def lines() -> Iterator[str]:
        while True:
            pairs.append((_uuid(draw), _uuid(draw)))
            yield _NEEDLE.format(key=pairs[-1][0], value=pairs[-1][1])

    taken = room.fill(lines(), beside=[_OPENING], least=room.questions)
    asked = []
    for place in strata(draw, room.questions, len(taken)):
        key, value = pairs[place]
        question, begun = _QUESTION.format(key=key), _BEGUN.format(key=key)
        asked.append(Asked(question, f" {value}", (place,), begun))
    return Draft(_OPENING, taken, shuffled(draw, asked))


def _uuid(draw: random.Random) -> str:
    return str(uuid.UUID(int=draw.getrandbits(128), version=4))
