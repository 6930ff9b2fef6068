"""How much of a row the top-k kernel lists, and how many digits it looks at.

A copy of csrc/topk/row.cuh in numpy. The kernel's clocks are the model's; how often its steps
happen follows from the logits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

SIZES = VECTORS, FINE_SHIFT, CAPACITY, THREADS = 7, 18, 8192, 1024
"""``kVectors`` and ``kFineShift`` of row.cuh, ``kCapacity`` and ``kThreads`` of topk.cu; a test
compares them."""
BINS = 256
LINE_VECTORS = 8
SEEDS = 3
_LOWEST = 0x007FFFFF


@dataclass(frozen=True)
class Counts:
    """Of one row.

    Attributes:
        listed: entries of all blocks.
        fullest: of the block that lists most; above CAPACITY lists are cut.
        rounds: digits until the k-th largest is known.
    """

    listed: float
    fullest: float
    rounds: float


@cache
def average(context: int, k: int, cluster: int) -> Counts:
    """Over rows of normal logits."""
    found = [
        count(np.random.default_rng(seed).standard_normal(context).astype(np.float32), k, cluster)
        for seed in range(SEEDS)
    ]
    return Counts(
        float(np.mean([one.listed for one in found])),
        float(np.mean([one.fullest for one in found])),
        float(np.mean([one.rounds for one in found])),
    )


def count(row: NDArray[np.float32], k: int, cluster: int) -> Counts:
    """One row of a multiple of four logits, more than k."""
    keys = _order_keys(row).reshape(-1, 4)
    each = math.ceil(math.ceil(len(keys) / cluster) / LINE_VECTORS) * LINE_VECTORS
    shares = [keys[low : low + each] for low in range(0, len(keys), each)]
    bound = min(_bound(share, -(-k * len(share) // len(keys))) for share in shares)
    top = max(int(share[: VECTORS * THREADS].max()) for share in shares)
    listed = [int((share >= bound).sum()) for share in shares]
    flat = keys.ravel()
    entries = [int(flat[at]) << 32 | (0xFFFFFFFF ^ int(at)) for at in np.flatnonzero(flat >= bound)]
    return Counts(
        sum(listed), max(listed), _rounds(entries, k, bound << 32, top << 32 | 0xFFFFFFFF)
    )


def _order_keys(row: NDArray[np.float32]) -> NDArray[np.int64]:
    bits = (row + np.float32(0)).view(np.uint32).astype(np.int64)
    return np.where(bits >> 31, bits ^ 0xFFFFFFFF, bits | 0x80000000)


def _bound(share: NDArray[np.int64], wanted: int) -> int:
    """What ``wanted`` of a share's first chunk reach."""
    chunk = share[: VECTORS * THREADS]
    padded = np.full((VECTORS * THREADS, 4), -1, dtype=np.int64)
    padded[: len(chunk)] = chunk
    best = padded.reshape(VECTORS, THREADS, 4).max(0)
    groups = best.max(1) if 2 * wanted <= THREADS else best.ravel()
    groups = groups[groups >= 0]
    least = int(groups.min())
    shift = _shift(int(groups.max()) - least)
    while True:
        bins = (groups - least) >> shift
        inside = (bins >= 0) & (bins < BINS)
        from_top = np.bincount(bins[inside], minlength=BINS)[::-1].cumsum()
        if from_top[-1] < wanted:
            return _LOWEST
        at = int(np.argmax(from_top >= wanted))
        wanted -= int(from_top[at - 1]) if at else 0
        least += (BINS - 1 - at) << shift
        if shift <= FINE_SHIFT:
            return least
        shift = max(shift - 8, 0)


def _rounds(entries: list[int], k: int, bound: int, nominal: int) -> int:
    shift, limit, wanted = _shift(nominal - bound), (1 << 64) - 1, k
    for number in range(1, 20):
        inside = [entry for entry in entries if bound <= entry <= limit]
        digits = np.array([min((entry - bound) >> shift, BINS - 1) for entry in inside])
        from_top = np.bincount(digits, minlength=BINS)[::-1].cumsum()
        at = int(np.argmax(from_top >= wanted))
        digit = BINS - 1 - at
        above = int(from_top[at - 1]) if at else 0
        bound += digit << shift
        if digit < BINS - 1:
            limit = bound + (1 << shift) - 1
        wanted -= above
        if int(from_top[at]) - above == wanted or shift == 0:
            return number
        shift = _shift(limit - bound)
    raise AssertionError("every round fixes a digit of 64 bits")


def _shift(span: int) -> int:
    return max(span.bit_length() - 8, 0)
