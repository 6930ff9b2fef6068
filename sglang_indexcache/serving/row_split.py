"""The row split: each rank of attention's tensor parallelism selects for its share of the rows.

Under attention TP all ranks hold the same hidden states and the same index keys, and SGLang lets
each of them run every F layer's indexer for every query row. Here a rank scores a part of a
prefill's rows, and one gather of int32 lists gives all ranks all lists. Nothing is approximated:
each row is scored once, from the same inputs, by the same kernel.

Each rank's rows follow from lengths that the host knows, so all ranks compute the same split. No
rank may decide from facts that only it knows, such as its free memory, because the others would
wait in the gather. Rows after the last request are padding and belong to no rank.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import isqrt
from typing import Any

import torch

from sglang_indexcache.kernels.contract import PADDING


@dataclass(frozen=True)
class GatherCost:
    """Cost of a gather, as the number of (row, key) pairs that are scored in the same time.

    Attributes:
        call: cost of the call itself: its launch, and the splitting and joining of tensors around
            it.
        entries_a_pair: number of list entries that are moved in the time of scoring one pair.
    """

    call: int
    entries_a_pair: int

    def pairs(self, entries: int) -> int:
        """Return the cost of a gather of ``entries`` list entries."""
        return self.call + entries // self.entries_a_pair


ON_GPU = GatherCost(call=4_000_000, entries_a_pair=1)
"""Cost on GPUs. An H100 scores 8,192 rows of 120K tokens in 12.0 ms
(``benchmarks/results/kernels/h100.md``): 79 pairs a nanosecond. Eight GPUs gather 67 MB in 0.21 ms
(NVIDIA's rows of NCCL 2.29.2): 80 entries a nanosecond. The 50 us for a call and the work around it
are a guess."""

ON_CPU = GatherCost(call=10_000, entries_a_pair=8)
"""Cost on CPUs. A core scores a pair of the shipped model in 19 ns (5.6 s for a prompt of 7,000
tokens). A gather by gloo between two processes takes 0.16 ms, plus 2.3 ns per entry."""

MARGIN = 2
"""Factor by which a split must save more than its gather costs, since the costs are estimates."""


@dataclass(frozen=True)
class RowShare:
    """Rows of a batch that one rank scores, which form a prefill batch of their own.

    Attributes:
        start: the first of these rows in the whole batch; ``stop`` is one past the last.
        first: the first request that has rows in the share.
        query_lens: number of rows of each request from ``first`` on.
        key_lens: number of keys that the last of these rows sees; no further keys are needed.
    """

    start: int
    stop: int
    first: int
    query_lens: tuple[int, ...]
    key_lens: tuple[int, ...]

    @property
    def rows(self) -> slice:
        """Range of the whole batch's rows in this share."""
        return slice(self.start, self.stop)

    @property
    def requests(self) -> slice:
        """Range of the batch's requests that have rows in this share."""
        return slice(self.first, self.first + len(self.query_lens))


@dataclass(frozen=True)
class RowSplit:
    """A prefill's query rows, assigned to ranks in order: rank ``r`` starts at ``bounds[r]``.

    Attributes:
        query_lens: number of rows of each request, which are its last tokens.
        key_lens: number of tokens of each request, query rows included.
        bounds: first row of each rank, and finally the number of rows.
    """

    query_lens: tuple[int, ...]
    key_lens: tuple[int, ...]
    bounds: tuple[int, ...]

    @classmethod
    def balanced(
        cls,
        query_lens: Sequence[int],
        key_lens: Sequence[int],
        ranks: int,
        *,
        free: int = 0,
        block: int = 1,
    ) -> RowSplit:
        """Assign equal numbers of (row, key) pairs to ranks, because scoring cost grows with pairs.

        A request may be cut anywhere, and a rank may have no rows.

        Args:
            free: rows that see at most this many keys are not scored.
            block: a request is cut only at multiples of this many rows, counted from its first
                scored row, and never just before its last row. A kernel that works in blocks then
                sees the same blocks in a share as in the whole, and rounds the same way.
        """
        sizes = tuple(zip(query_lens, key_lens, strict=True))
        starts = [0, *accumulate(query_lens)]
        pairs = [0, *accumulate(_pairs(queries, keys, free) for queries, keys in sizes)]
        bounds = [0]
        for rank in range(1, ranks):
            aim = pairs[-1] * rank // ranks
            request = max(0, bisect_left(pairs, aim) - 1)
            queries, keys = sizes[request] if sizes else (0, 0)
            before = min(max(keys - queries, free), keys)  # keys that the last unscored row sees
            blocks = (_rows_for(aim - pairs[request], before) + block // 2) // block
            left = max(0, keys - before - blocks * block)
            bounds.append(starts[request] + queries - (left if left > 1 else 0))
        return cls(tuple(query_lens), tuple(key_lens), (*bounds, starts[-1]))

    @property
    def widest(self) -> int:
        """Number of rows in the largest share, to which the others are padded in the gather."""
        return max(stop - start for start, stop in pairwise(self.bounds))

    def share(self, rank: int) -> RowShare:
        """Return the rows of ``rank``."""
        start, stop = self.bounds[rank], self.bounds[rank + 1]
        starts = [0, *accumulate(self.query_lens)]
        first = max(0, bisect_right(starts, start) - 1)
        places = range(first, bisect_left(starts, stop) if start < stop else first)
        queries = (min(starts[n + 1], stop) - max(starts[n], start) for n in places)
        keys = (self.key_lens[n] - max(0, starts[n + 1] - stop) for n in places)
        return RowShare(start, stop, first, tuple(queries), tuple(keys))

    def pays(self, topk: int, cost: GatherCost, free: int = 0) -> bool:
        """Return whether a rank saves more by scoring fewer pairs than the gather costs."""
        ranks = len(self.bounds) - 1
        total = _pairs_of(self.query_lens, self.key_lens, free)
        if total <= MARGIN * cost.call:
            return False
        shares = map(self.share, range(ranks))
        most = max(_pairs_of(share.query_lens, share.key_lens, free) for share in shares)
        return total - most > MARGIN * cost.pairs(ranks * self.widest * topk)


class RowSplitter:
    """The row split as one rank sees it: assigns rows of prefills, gathers lists and counts rows.

    Args:
        group: SGLang's process group of attention's tensor parallelism.
        topk: number of entries in a list.
        free: as for :meth:`RowSplit.balanced`, and so is ``block``.
    """

    def __init__(
        self, group: Any, topk: int, cost: GatherCost, *, free: int = 0, block: int = 1
    ) -> None:
        self._group, self._topk, self._cost = group, topk, cost
        self._rank, self._ranks = int(group.rank_in_group), int(group.world_size)
        self._free, self._block = free, block
        self._scored = self._selected = 0

    @classmethod
    def here(cls, *args: Any, **kwargs: Any) -> RowSplitter | None:
        """Make this process's splitter, whose ``group`` is SGLang's; None for a single rank."""
        from sglang.srt.runtime_context import get_parallel

        group = get_parallel().attn_tp_group
        return cls(group, *args, **kwargs) if group.world_size > 1 else None

    def split(self, query_lens: Sequence[int], key_lens: Sequence[int]) -> RowSplit | None:
        """Assign a prefill's rows to ranks; None if a gather would cost more than it saves."""
        split = RowSplit.balanced(
            query_lens, key_lens, self._ranks, free=self._free, block=self._block
        )
        return split if split.pays(self._topk, self._cost, self._free) else None

    def select(
        self,
        split: RowSplit,
        out: torch.Tensor,
        select_share: Callable[[RowShare], torch.Tensor],
    ) -> torch.Tensor:
        """Select for this rank's rows, and gather the lists of all ranks.

        Args:
            out: ``[>= rows, topk]`` int32, for all lists; padding rows keep their content.
            select_share: returns ``[n, topk]`` int32 for a share with ``n`` > 0 rows.
        """
        share, widest = split.share(self._rank), split.widest
        self.count(share.stop - share.start, split.bounds[-1])
        mine = out.new_full((widest, self._topk), PADDING)
        if share.query_lens:
            mine[: share.stop - share.start] = select_share(share)
        everybodys = out.new_empty((self._ranks * widest, self._topk))
        self._group.all_gather_into_tensor(everybodys, mine)
        for rank, (start, stop) in enumerate(pairwise(split.bounds)):
            out[start:stop] = everybodys[rank * widest : rank * widest + stop - start]
        return out

    def count(self, scored: int, selected: int) -> None:
        """Count the rows that this rank's indexers scored, and the rows for which it got lists."""
        self._scored += scored
        self._selected += selected

    def report(self) -> dict[str, Any]:
        """Return the counts of all ranks in the group, which must all call this together."""
        return {
            "scored_rows": self._group.all_gather_object(self._scored),
            "selected_rows": self._selected,
        }


def _triangle(count: int) -> int:
    return count * (count + 1) // 2


def _pairs(queries: int, keys: int, free: int) -> int:
    """Count the (row, key) pairs in a request's rows that see more than ``free`` keys."""
    return _triangle(keys) - _triangle(min(max(keys - queries, free), keys))


def _pairs_of(query_lens: Sequence[int], key_lens: Sequence[int], free: int) -> int:
    sizes = zip(query_lens, key_lens, strict=True)
    return sum(_pairs(queries, keys, free) for queries, keys in sizes)


def _rows_for(pairs: int, before: int) -> int:
    """Return how many rows have ``pairs`` pairs, if the row before them sees ``before`` keys."""
    goal = pairs + _triangle(before)
    seen = (isqrt(8 * goal + 1) - 1) // 2  # the largest count whose triangle is at most the goal
    return seen - before + (_triangle(seen) < goal)
