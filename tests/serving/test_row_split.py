"""Rows that each rank scores, against a plain count of pairs, and one gather of their lists."""

from __future__ import annotations

from threading import Barrier, Thread
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_indexcache.serving.row_split import (
    ON_CPU,
    ON_GPU,
    GatherCost,
    RowShare,
    RowSplit,
    RowSplitter,
)

Sizes = list[tuple[int, int]]
"""Rows and keys of each request."""

REQUESTS = st.lists(
    st.tuples(st.integers(0, 200), st.integers(0, 300)).map(lambda pair: (pair[0], sum(pair))),
    max_size=8,
)
RANKS = st.integers(1, 9)


def split_of(sizes: Sizes, ranks: int, free: int = 0, block: int = 1) -> RowSplit:
    queries, keys = [rows for rows, _ in sizes], [length for _, length in sizes]
    return RowSplit.balanced(queries, keys, ranks, free=free, block=block)


def shares_of(split: RowSplit) -> list[RowShare]:
    return [split.share(rank) for rank in range(len(split.bounds) - 1)]


def rows_of(sizes: Sizes, first: int = 0) -> list[tuple[int, int]]:
    """Return the request and the visible keys of each row, those without rows left out."""
    return [
        (first + request, keys - rows + 1 + row)
        for request, (rows, keys) in enumerate(sizes)
        for row in range(rows)
    ]


def costs_of(sizes: Sizes, free: int) -> list[int]:
    return [visible if visible > free else 0 for _, visible in rows_of(sizes)]


def sizes_of(share: RowShare) -> Sizes:
    return list(zip(share.query_lens, share.key_lens, strict=True))


@given(REQUESTS, RANKS, st.integers(0, 400), st.sampled_from([1, 32]))
def test_shares_are_the_rows_in_order(sizes: Sizes, ranks: int, free: int, block: int) -> None:
    """Every row has one rank, and is the same row of the same request there."""
    split = split_of(sizes, ranks, free, block)
    shares = shares_of(split)
    joined = [row for share in shares for row in rows_of(sizes_of(share), share.first)]
    assert joined == rows_of(sizes)
    assert [share.start for share in shares[1:]] == [share.stop for share in shares[:-1]]
    assert all(len(rows_of(sizes_of(share))) == share.stop - share.start for share in shares)
    assert split.widest == max(share.stop - share.start for share in shares)


@given(REQUESTS, RANKS, st.integers(0, 400), st.sampled_from([1, 4, 32]))
def test_shares_cost_the_same_to_within_a_block(
    sizes: Sizes, ranks: int, free: int, block: int
) -> None:
    """Beside the block, one row more may be taken so that none is left alone."""
    costs = costs_of(sizes, free)
    even, dearest = sum(costs) / ranks, max(costs, default=0)
    spare = 2 * dearest * ((block + 1) // 2 + 1)
    for share in shares_of(split_of(sizes, ranks, free, block)):
        assert abs(sum(costs[share.rows]) - even) <= spare


@given(st.integers(2, 5000), st.integers(0, 5000), RANKS)
def test_a_prompt_is_balanced_to_within_a_row(rows: int, prefix: int, ranks: int) -> None:
    sizes = [(rows, prefix + rows)]
    costs = costs_of(sizes, 0)
    bounds = split_of(sizes, ranks).bounds
    for rank, bound in enumerate(bounds[1:-1], 1):
        apart = sum(costs[:bound]) - sum(costs) * rank / ranks
        assert -1 <= apart < costs[min(bound, rows - 1)] + costs[-1]


@given(REQUESTS, RANKS, st.integers(0, 400))
def test_a_request_is_cut_at_blocks_of_its_scored_rows(sizes: Sizes, ranks: int, free: int) -> None:
    """So a kernel that goes by blocks meets whole ones, and no row alone that was not alone."""
    rows, starts, place = [queries for queries, _ in sizes], [0], 0
    for count in rows:
        starts.append(starts[-1] + count)
    for bound in split_of(sizes, ranks, free, block=32).bounds[1:-1]:
        for request, (queries, keys) in enumerate(sizes):
            place = bound - starts[request]
            if 0 < place < queries:
                first = queries - (keys - min(max(keys - queries, free), keys))
                is_behind_last_block = queries - place != 1 and (place - first) % 32 == 0
                assert is_behind_last_block or place == queries
                assert place >= first


def test_a_rank_may_have_none() -> None:
    shares = shares_of(split_of([(1, 50), (0, 9)], 3))
    assert sorted(share.stop - share.start for share in shares) == [0, 0, 1]
    assert [share.query_lens for share in shares_of(split_of([], 2))] == [(), ()]


def test_keys_are_needed_as_far_as_the_last_row_sees() -> None:
    first, second = shares_of(split_of([(8, 8), (0, 5), (4, 100)], 2))
    assert sizes_of(first) == [(8, 8), (0, 5), (2, 98)]
    assert (second.first, sizes_of(second)) == (2, [(2, 100)])


@pytest.mark.parametrize(
    ("rows", "prefix", "splits"),
    [(8192, 0, False), (8192, 8192, True), (8192, 120_000, True), (128, 4096, False)],
)
def test_on_a_gpu_long_chunks_behind_long_prefixes_are_split(
    rows: int, prefix: int, splits: bool
) -> None:
    """A first chunk of 8,192 rows with lists of 2,048 is not worth the gather, a second is."""
    assert split_of([(rows, prefix + rows)], 8).pays(2048, ON_GPU) == splits


def test_on_a_cpu_short_prompts_are_not_split() -> None:
    assert not split_of([(100, 100)], 2, free=64, block=32).pays(64, ON_CPU, free=64)
    assert split_of([(1000, 1000)], 2, free=64, block=32).pays(64, ON_CPU, free=64)
    assert not split_of([(64, 64)], 2, free=64).pays(64, GatherCost(0, 1), free=64)


class Ranks:
    """A group of ranks, each of them a thread."""

    def __init__(self, count: int) -> None:
        self.world_size = count
        self._values: list[Any] = [None] * count
        self._barrier = Barrier(count, timeout=60)

    def member(self, rank: int) -> Member:
        return Member(self, rank)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values


class Member:
    """SGLang's group as one of its ranks sees it."""

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self._ranks, self.rank_in_group, self.world_size = ranks, rank, ranks.world_size

    def all_gather_into_tensor(self, out: torch.Tensor, mine: torch.Tensor) -> None:
        out.copy_(torch.cat(self._ranks.exchange(self.rank_in_group, mine)))

    def all_gather_object(self, value: Any) -> list[Any]:
        return self._ranks.exchange(self.rank_in_group, value)


@pytest.mark.parametrize("sizes", [[(9, 20), (0, 3), (70, 70), (1, 200)], [(1, 900)], [(5, 5)]])
@pytest.mark.parametrize("count", [2, 4])
def test_every_rank_has_all_lists(sizes: Sizes, count: int) -> None:
    """Rows of padding keep what they held."""
    rows, topk = sum(queries for queries, _ in sizes), 3
    lists = torch.arange(rows * topk, dtype=torch.int32).view(rows, topk)
    results = [torch.full((rows + 2, topk), -7, dtype=torch.int32) for _ in range(count)]
    ranks, reports = Ranks(count), [dict[str, Any]()] * count

    def run(rank: int) -> None:
        splitter = RowSplitter(ranks.member(rank), topk, GatherCost(-(10**9), 1))
        split = splitter.split(*zip(*sizes, strict=True))
        assert split is not None
        splitter.select(split, results[rank], lambda share: lists[share.rows])
        reports[rank] = splitter.report()

    threads = [Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        assert torch.equal(result[:rows], lists)
        assert (result[rows:] == -7).all()
    assert all(report["selected_rows"] == rows for report in reports)
    assert all(sum(report["scored_rows"]) == rows for report in reports)
