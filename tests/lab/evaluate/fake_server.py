"""Material to ask the fake server with: a tokenizer of words, and text."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from functools import partial
from typing import Any

from sglang_indexcache.lab.data.words import ADJECTIVES, NOUNS
from tests.fakes.server import FakeServer

LAYERS = 12
TOPK = 64


class Words:
    """A tokenizer of words, spaces and signs, the same in every process."""

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> dict[str, Any]:
        del add_special_tokens  # it has none
        return {"input_ids": [[_id(piece) for piece in _pieces(line)] for line in text]}

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


Fake = partial(FakeServer, pattern="F" * LAYERS, mode="live", spread=0.9)
"""A server that is asked questions: the more layers share, the more answers are wrong."""
