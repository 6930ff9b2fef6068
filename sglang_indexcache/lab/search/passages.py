"""Passages of a text that come again at its end, so that a loss also sees what copying needs.

Most tokens follow from the few before them. Whether a pattern keeps the few heads that look up
something far back shows only where a text asks for it (docs/real-model.md).
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import chain

import numpy as np

from sglang_indexcache.lab.data.marking import Marked

LENGTH, CUE = 64, 16
"""Tokens of a passage, and how many of them tell which passage it is; the others count."""
MOST = 8
SHORTEST = 8
"""Tokens of a passage; a text that is too short for one gets none."""


@dataclass(frozen=True)
class Passages:
    """Places of the passages that replace the end of a text.

    Attributes:
        kept: tokens of the text that stay as they are.
        starts: of each passage in them, in the order in which they come again.
        length, cue: tokens of a passage, and how many of them do not count.
    """

    kept: int
    starts: tuple[int, ...]
    length: int
    cue: int

    @classmethod
    def of(cls, length: int, seed: int | str) -> Passages:
        """Choose them for a text of ``length`` tokens: at most a quarter of it, from all over it.

        From 256 tokens on a passage has 64, and there is one for every 256 tokens, eight at most.
        """
        size = min(LENGTH, length // 4)
        if size < SHORTEST:
            return cls(length, (), 0, 0)
        count = min(MOST, length // (4 * size))
        prefix = length - count * size
        order = random.Random(seed).sample(range(count), count)
        starts = [(prefix - size) * (2 * place + 1) // (2 * count) for place in order]
        return cls(prefix, tuple(starts), size, size * CUE // LENGTH)

    @property
    def counted(self) -> np.ndarray:
        """``[n]`` int64, the places of the repeated tokens that count."""
        firsts = self.kept + self.length * np.arange(len(self.starts))
        return (firsts[:, None] + np.arange(self.cue, self.length)).reshape(-1)


def with_passages(text: Marked) -> Marked:
    """Return ``text`` with passages of it in the place of its end.

    Marked are the later half of what stays, and of each passage all tokens but the cue.
    """
    passages = Passages.of(len(text), str(text.ids))
    repeated = (text.ids[start : start + passages.length] for start in passages.starts)
    marked = np.zeros(len(text), dtype=bool)
    marked[passages.kept // 2 : passages.kept] = True
    marked[passages.counted] = True
    return Marked((*text.ids[: passages.kept], *chain.from_iterable(repeated)), marked)
