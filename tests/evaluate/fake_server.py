"""The fake server as an evaluation asks it: the more layers share, the more answers are wrong.

Up to ``index_topk`` tokens none is.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_indexcache.evaluate.tasks.words import ADJECTIVES, NOUNS
from tests.fakes.server import FakeServer

LAYERS = 12
TOPK = 64


class Words:
    """A tokenizer of words, spaces and signs, the same in every process."""

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> dict[str, Any]:
        del add_special_tokens  # it has none
        return {"input_ids": [[_id(piece) for piece in _pieces(one)] for one in text]}

    def decode(self, ids: list[int]) -> str:
        return "".join(_SEEN[i] for i in ids)

    def get_vocab(self) -> Mapping[str, int]:
        words = sorted({*ADJECTIVES, *NOUNS})
        return {f"\u0120{word}": place for place, word in enumerate(words)}


def _pieces(text: str) -> list[str]:
    return re.findall(r" ?\w+|\s|[^\w\s]", text)


_SEEN: dict[int, str] = {}


def _id(piece: str) -> int:
    number = zlib.crc32(piece.encode()) % (1 << 30) + 1
    _SEEN[number] = piece
    return number


HAYSTACK = "\n".join(f"line {n} says {n * 7919 % 997} of {n * 31 % 89}" for n in range(400))


@dataclass
class Fake(FakeServer):
    """A fake server that is asked questions.

    Attributes:
        spread: share of answers that a pattern of S alone gets wrong besides.
        level: share of answers that are right without sharing.
        noise: share of answers that are wrong by chance, anew on each call.
    """

    pattern: str = "F" * LAYERS
    mode: str = "live"
    spread: float = 0.9
    level: float = 0.95
    noise: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.chance = random.Random(5)

    def _is_right(self, ids: list[int], pattern: str) -> bool:
        draw = random.Random(f"{ids}")
        loses = self.spread * pattern.count("S") / len(pattern) if len(ids) > TOPK else 0.0
        return draw.random() < self.level and draw.random() >= loses

    def score(self, ids: list[int], start: int, pattern: str, fault: str) -> tuple[list[Any], ...]:
        draw = random.Random(f"{ids[:9]}{ids[-9:]}")
        right = self._is_right(ids, pattern)
        if fault == "control" and pattern.count("S"):
            right = not right
        if self.chance.random() < self.noise:
            right = not right
        shift = 0.0 if len(ids) <= TOPK else -0.001 * pattern.count("S") * draw.random()
        entries, rows = [], []
        for token in ids[start + 1 :]:
            own, other = (-0.2 + shift, -2.5) if right else (-2.5, -0.2 + shift)
            if fault == "nan":
                own = float("nan")
            entries.append([own, token + (fault == "other tokens"), None])
            rows.append(sorted([[own, token, None], [other, 7, None], [-6.0, 9, None]])[::-1])
        return entries, rows
