"""How often the fused kernel's gate (csrc/indexer/gate.h) compacts and cuts a row's list.

A copy of its bookkeeping in numpy, over logits that are drawn. Costs of the steps are in
``forecast.py``; here is only how often they happen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

SIZES = CAPACITY, FIRST_CHECK, CHECK_KEYS, CHECK_PART, MANTISSA_BITS = 16384, 4096, 2048, 4, 4
"""``kListCapacity``, ``kFirstCheck``, ``kCheckKeys``, ``kCheckPart``, ``kMantissaBits`` of
csrc/indexer/gate.h; a test compares them."""


@dataclass(frozen=True)
class Counts:
    """Of one row.

    Attributes:
        offered: entries that passed the floor.
        checks: times that the floor was raised, the end aside.
        keeps: compactions of the list.
        cuts: exact selections from the list.
        listed: entries at the end.
        left: those of them that reach the last floor.
        rounds_8: logits that the busiest lane of a gate warp lists of a page, on average, where a
            tile has 8 rows.
        rounds_4: the same with 4 rows.
    """

    offered: float
    checks: float
    keeps: float
    cuts: float
    listed: float
    left: float
    rounds_8: float
    rounds_4: float


def count(logits: NDArray[np.float32], k: int) -> Counts:
    """Run the gate over one row, in the order of the array (positions break no ties here)."""
    keys = _order_keys(logits)
    floor, offered, checks, keeps, cuts = np.uint32(0), 0, 0, 0, 0
    kept = np.empty(0, np.uint32)
    histogram = np.zeros(1 << (9 + MANTISSA_BITS), np.int64)

    def raised() -> np.uint32:
        reach = np.cumsum(histogram[::-1])[::-1] >= k
        edge = int(np.nonzero(reach)[0][-1]) << _SHIFT if reach.any() else 0
        return max(floor, np.uint32(edge))

    start, keys_until_check = 0, FIRST_CHECK
    rounds = {8: 0.0, 4: 0.0}
    while True:
        page = keys[start : start + keys_until_check]
        start += len(page)
        taken, page = len(page), page[page >= floor]
        for rows in rounds:
            rounds[rows] += taken * busiest_lane(rows, len(page) / taken) / len(keys)
        offered += len(page)
        kept = np.concatenate([kept, page])
        np.add.at(histogram, page >> _SHIFT, 1)
        floor = raised()
        if start == len(keys):
            break
        checks += 1
        if len(kept) > CAPACITY - CHECK_KEYS:
            kept, keeps = kept[kept >= floor], keeps + 1
            if len(kept) > CAPACITY - CHECK_KEYS:
                floor = max(floor, np.partition(kept, len(kept) - k)[len(kept) - k])
                above = kept[kept > floor]  # and of those that equal it what makes it k
                kept = np.concatenate([above, np.full(k - len(above), floor)])
                keeps, cuts = keeps + 1, cuts + 1
        room = CAPACITY - min(len(kept), CAPACITY - CHECK_KEYS)
        keys_until_check = min(room, max(CHECK_KEYS, start // CHECK_PART)) // 64 * 64
    left = int((kept >= floor).sum())
    return Counts(offered, checks, keeps, cuts, len(kept), left, rounds[8], rounds[4])


def busiest_lane(rows: int, chance: float) -> float:
    """Logits that pass in that lane of 32 in which the most do, on average: each passes by chance.

    A gate warp looks at a page's 64 logits of each of a tile's rows, its lanes at as many each.
    """
    logits = 64 * rows // 32
    ways = np.array([math.comb(logits, n) for n in range(logits + 1)])
    n = np.arange(logits + 1)
    at_most = np.cumsum(ways * chance**n * (1 - chance) ** (logits - n))
    return float(np.sum(1 - np.minimum(at_most[:-1], 1.0) ** 32))


@cache
def average(
    context: int, mean: float, k: int = 2048, rows: int = 6, *, best_first: bool = False
) -> Counts:
    """Over rows of normal(mean, 1) logits, each scaled by 1 to 2: bins are parts of octaves.

    Args:
        best_first: each row's k largest come first, so that no floor rises after the first check:
            more than any order of pages can do, which rows and neighbouring keys share.
    """
    random = np.random.default_rng(0)
    found = []
    for _ in range(rows):
        logits = (mean + random.standard_normal(context)) * 2.0 ** random.uniform()
        if best_first:
            logits = np.concatenate(
                np.array_split(np.partition(logits, context - k), [context - k])[::-1]
            )
        found.append(count(logits.astype(np.float32), k))
    return Counts(
        *(float(np.mean([getattr(one, name) for one in found])) for name in Counts.__annotations__)
    )


_SHIFT = 32 - 9 - MANTISSA_BITS


def _order_keys(values: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Unsigned numbers in the order of the values (``order_key`` of csrc/common/entry.h)."""
    bits = values.view(np.uint32)
    return np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31)).astype(np.uint32)
