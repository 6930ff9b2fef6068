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

OPENING = (
    "Some special magic {kind}s are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind}s afterwards."
)
NEEDLE = "One of the special magic {kind}s for {key} is: {value}."
_QUESTION = (
    "What is the special magic {kind} for {key} mentioned in the provided text? "
    "The special magic {kind} for {key} mentioned in the provided text is"
)


def needles(draw: random.Random, room: Room, haystack: str) -> Draft:
    """A haystack that is made of needles."""
    del haystack
    pairs: list[tuple[str, str]] = []

    def lines() -> Iterator[str]:
        while True:
            pairs.append((_uuid(draw), _uuid(draw)))
            yield NEEDLE.format(kind="uuid", key=pairs[-1][0], value=pairs[-1][1])

    opening = OPENING.format(kind="uuid")
    taken = room.fill(lines(), beside=[opening], least=room.questions)
    asked = [
        asked_for("uuid", *pairs[place], place)
        for place in strata(draw, room.questions, len(taken))
    ]
    return Draft(opening, taken, shuffled(draw, asked))


def asked_for(kind: str, key: str, value: str, line: int) -> Asked:
    """The question for one needle."""
    return Asked(_QUESTION.format(kind=kind, key=key), f" {value}", (line,))


def _uuid(draw: random.Random) -> str:
    return str(uuid.UUID(int=draw.getrandbits(128), version=4))
