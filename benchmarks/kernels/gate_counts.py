"""How often the fused kernel's gate (csrc/indexer/gate.h) compacts and cuts a row's list.

A copy of its bookkeeping in numpy, over logits that are drawn. Costs of the steps are in
``forecast.py``; here is only how often they happen.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

CAPACITY, CHECK_KEYS, BITS = 8192, 2048, 11
"""``kListCapacity``, ``kCheckKeys``, ``kGateBits`` of csrc/indexer/gate.h; a test compares them."""


@dataclass(frozen=True)
class Counts:
    """Of one row.

    Attributes:
        offered: entries that passed the floor.
        keeps: compactions of the list.
        cuts: exact selections from the list.
        left: entries at the end.
    """

    offered: float
    keeps: float
    cuts: float
    left: float


def count(logits: NDArray[np.float32], k: int) -> Counts:
    """Run the gate over one row, in the order of the array (positions break no ties here)."""
    keys = _order_keys(logits)
    floor, offered, keeps, cuts = np.uint32(0), 0, 0, 0
    kept = np.empty(0, np.uint32)
    histogram = np.zeros(1 << BITS, np.int64)
    for start in range(0, len(keys), CHECK_KEYS):
        if start:
            reach = np.cumsum(histogram[::-1])[::-1] >= k
            if reach.any():
                edge = np.uint32(int(np.nonzero(reach)[0][-1]) << (32 - BITS))
                floor = max(floor, edge)
            if len(kept) > CAPACITY - CHECK_KEYS:
                kept, keeps = kept[kept >= floor], keeps + 1
            if len(kept) > CAPACITY - CHECK_KEYS:
                floor = max(floor, np.partition(kept, len(kept) - k)[len(kept) - k])
                kept, keeps, cuts = kept[kept >= floor], keeps + 1, cuts + 1
        page = keys[start : start + CHECK_KEYS]
        page = page[page >= floor]
        offered += len(page)
        kept = np.concatenate([kept, page])
        np.add.at(histogram, page >> (32 - BITS), 1)
    return Counts(offered, keeps, cuts, len(kept))


@cache
def average(context: int, mean: float, k: int = 2048, rows: int = 6) -> Counts:
    """Over rows of normal(mean, 1) logits, each scaled by 1 to 2: bins are octaves of values."""
    random = np.random.default_rng(0)
    found = []
    for _ in range(rows):
        logits = (mean + random.standard_normal(context)) * 2.0 ** random.uniform()
        found.append(count(logits.astype(np.float32), k))
    return Counts(
        *(float(np.mean([getattr(one, name) for one in found])) for name in Counts.__annotations__)
    )


def _order_keys(values: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Unsigned numbers in the order of the values (``order_key`` of csrc/common/entry.h)."""
    bits = values.view(np.uint32)
    return np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31)).astype(np.uint32)
