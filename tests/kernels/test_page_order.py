"""The order of pages that a selection leaves: any permutation is right, a good one saves work."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from sglang_indexcache.kernels.contract import MAX_PAGES, PAGE_TOKENS, IndexerBatch
from sglang_indexcache.kernels.grid import cases
from sglang_indexcache.kernels.indexer import reference
from sglang_indexcache.kernels.indexer.page_order import SAMPLE_ROWS, HotPages
from tests.kernels import cuda_host
from tests.kernels.test_cuda_select import make_row, oracle

CPU = torch.device("cpu")


def page_order(
    selected: torch.Tensor, batch: IndexerBatch, *, as_slots: bool = False
) -> torch.Tensor:
    return HotPages.of(batch, as_slots=as_slots).order(selected)


def counted(selected: torch.Tensor, batch: IndexerBatch) -> list[list[int]]:
    """Selected positions of each page and request, a row at a time."""
    counts = [[0] * batch.block_table.shape[1] for _ in batch.block_table]
    for request, rows in reference.requests(batch):
        for position in selected[rows].flatten().tolist():
            if position >= 0:
                counts[request][position // PAGE_TOKENS] += 1
    return counts


@st.composite
def drawn(draw: st.DrawFn) -> tuple[IndexerBatch, int, int]:
    pairs = draw(
        st.lists(st.tuples(st.integers(0, 9), st.integers(0, 900)), min_size=1, max_size=4)
    )
    lens = tuple((queries, queries + before) for queries, before in pairs)
    least = 0 if any(queries for queries, _ in lens) else 1
    case = cases.IndexerCase("drawn", 8, lens, padding=draw(st.integers(least, 5)))
    seed = draw(st.integers(0, 2**31))
    batch = cases.indexer_inputs(case, torch.Generator().manual_seed(seed), CPU)
    return batch, draw(st.integers(1, 30)), seed


@settings(max_examples=60, deadline=None)
@given(problem=drawn())
def test_hottest_pages_come_first(problem: tuple[IndexerBatch, int, int]) -> None:
    """Of any selection with -1 anywhere; table entries beyond a request lead nowhere."""
    batch, k, seed = problem
    generator = torch.Generator().manual_seed(seed)
    shape = len(batch.visible), k
    selected = torch.randint(-(1 << 20), 1 << 20, shape, generator=generator, dtype=torch.int32)
    selected = torch.where(selected < 0, -1, selected % batch.visible.clamp_min(1)[:, None])
    selected[batch.visible == 0] = -1
    total = int(batch.query_starts[-1])
    selected[total:] = -1
    slots = selected.clone()
    for request, rows in reference.requests(batch):
        slots[rows] = reference.slots_of(selected[rows], batch.block_table[request]).int()
    expected = counted(selected, batch)
    orders = page_order(selected, batch), page_order(slots, batch, as_slots=True)
    assert torch.equal(*orders)
    order = orders[0]
    assert order.dtype == torch.int32
    assert order.is_contiguous()
    width = batch.block_table.shape[1]
    for row, counts in zip(order.tolist(), expected, strict=True):
        assert sorted(row) == list(range(width))
        in_turn = [counts[page] for page in row]
        assert in_turn == sorted(counts, reverse=True)


def test_a_sample_of_many_rows_is_enough(generator: torch.Generator) -> None:
    """Two requests that select from pages of their own; each keeps to its own."""
    lens = (1000, 2000), (3000, 4000)
    case = cases.IndexerCase("two", 8, lens, padding=100)
    batch = cases.indexer_inputs(case, generator, CPU)
    selected = torch.full((4100, 4), 3 * PAGE_TOKENS, dtype=torch.int32)
    selected[1000:4000] = 50 * PAGE_TOKENS + 7
    selected[1000:4000, 1] = -1
    selected[4000:] = -1
    assert page_order(selected, batch)[:, 0].tolist() == [3, 50]
    assert len(selected) > SAMPLE_ROWS


def test_without_rows(generator: torch.Generator) -> None:
    """Rows of padding only, no request."""
    for lens, padding in ((((0, 200), (0, 64)), 3), ((), 2)):
        case = cases.IndexerCase("empty", 8, lens, padding=padding)
        batch = cases.indexer_inputs(case, generator, CPU)
        selected = torch.full((padding, 5), -1, dtype=torch.int32)
        for as_slots in (False, True):
            order = page_order(selected, batch, as_slots=as_slots)
            assert order.shape == batch.block_table.shape
            for row in order.tolist():
                assert sorted(row) == list(range(len(row)))


def spread(pages: int) -> torch.Tensor:
    """The order of a request that selected nothing."""
    batch = IndexerBatch(
        torch.zeros(1, 8, 128),
        torch.zeros(1, 8),
        torch.zeros(1, 8448),
        torch.zeros(1, pages + 3, dtype=torch.int32),
        torch.tensor([pages * PAGE_TOKENS], dtype=torch.int32),
        torch.tensor([0, 1], dtype=torch.int32),
    )
    return page_order(torch.full((1, 2), -1, dtype=torch.int32), batch)[0]


@pytest.mark.parametrize("pages", [1, 2, 100, 3125, 16_384])
def test_pages_that_nothing_tells_apart_are_spread(pages: int) -> None:
    """Every beginning of the order has its pages all over the request."""
    order = spread(pages)[:pages].numpy()
    assert sorted(order) == list(range(pages))
    for first in (10, 100, 1000):
        if first < pages:
            seen = np.sort(order[:first])
            assert np.diff(seen, prepend=-1, append=pages).max() < 4 * pages / first
    assert pages < MAX_PAGES


def test_the_gate_s_floors_rise_sooner() -> None:
    """The certificate holds in any order; in a good one less is listed, in the worst one all is."""
    n, k = 64 * 2000, 2048
    random = np.random.default_rng(3)
    row = make_row("normal", n, random)
    row += np.repeat((random.random(2000) < 0.05).astype(np.float32) * 3, 64)
    best = oracle(row, k)
    batch = IndexerBatch(
        torch.zeros(1, 8, 128),
        torch.zeros(1, 8),
        torch.zeros(1, 8448),
        torch.zeros(1, 2000, dtype=torch.int32),
        torch.tensor([n], dtype=torch.int32),
        torch.tensor([0, 1], dtype=torch.int32),
    )
    good = page_order(torch.from_numpy(best)[None], batch)[0].numpy()
    listed = {}
    orders = {"good": good, "bad": good[::-1].copy(), "random": random.permutation(good)}
    for name, order in orders.items():
        chosen, fullest, listed[name] = cuda_host.gate(row, k, 1, order.astype(np.int32))
        assert 0 <= fullest <= cuda_host.constant("gate.list_capacity")
        np.testing.assert_array_equal(chosen, best)
    assert listed["good"] < 0.8 * listed["random"] < listed["bad"]
    assert listed["good"] < 4096 + 2 * k


def test_the_gate_s_lists_hold_what_comes_again_and_again() -> None:
    """No permutation: the best page a million tokens long, whose equal entries no cut can drop."""
    n = 1 << 20
    row = make_row("normal", n, np.random.default_rng(1))
    _, fullest, _ = cuda_host.gate(row, 2048, 1, np.zeros(n // 64, dtype=np.int32))
    assert 0 <= fullest <= cuda_host.constant("gate.list_capacity")


@pytest.mark.parametrize("as_slots", [False, True])
def test_nothing_is_read_on_the_host(as_slots: bool, generator: torch.Generator) -> None:
    """Tensors without values: to read one is an error, as it is while a graph is captured."""
    case = cases.IndexerCase("two", 8, ((300, 900), (0, 64), (2, 70)), padding=3)
    batch = cases.indexer_inputs(case, generator, CPU)
    with FakeTensorMode() as mode:
        fields = {
            name: mode.from_tensor(each) for name, each in vars(batch).items() if each is not None
        }
        selected = torch.empty(305, 16, dtype=torch.int32)
        order = page_order(selected, IndexerBatch(**fields), as_slots=as_slots)
        assert order.shape == batch.block_table.shape
        with pytest.raises(DataDependentOutputException):
            order.max().item()


def test_a_part_keeps_its_requests_orders(generator: torch.Generator) -> None:
    lens = (2, 300), (2, 300), (2, 300)
    for decode in (False, True):
        case = cases.IndexerCase("parts", 8, lens, decode=decode)
        batch = cases.indexer_inputs(case, generator, CPU)
        order = torch.stack([torch.randperm(6, generator=generator) for _ in lens]).int()
        part = replace(batch, page_order=order).part(2, 6)
        assert part.page_order is not None
        assert torch.equal(part.page_order, order[1:] if decode else order)
        assert batch.part(2, 6).page_order is None
