"""The lightning indexer on a CPU: the blocked path against the formula."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_indexcache.kernels.indexer.reference import topk as reference_topk
from sglang_indexcache.serving.cpu import select
from sglang_indexcache.serving.row_split import RowSplit

SLOTS = 4096


def indexer_logits(q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return ``[T, S]``: ``sum_h weights[t, h] * relu(q[t, h] . keys[s])``."""
    return torch.einsum("th,ths->ts", weights, torch.einsum("thd,sd->ths", q, keys).relu())


class Problem:
    """Requests over one pool whose slots are in random order."""

    def __init__(self, lens: list[tuple[int, int]], heads: int, generator: torch.Generator) -> None:
        longest = max((keys for _, keys in lens), default=0)
        slots = [torch.randperm(SLOTS, generator=generator)[:longest] for _ in lens]
        self.batch = select.HostBatch(
            tuple(q for q, _ in lens),
            tuple(k for _, k in lens),
            torch.stack(slots) if slots else torch.empty(0, 0, dtype=torch.int64),
        )
        rows = self.batch.num_rows
        # Small integers: every product and sum is exact, so that selections can be compared.
        self.keys = torch.randint(-3, 4, (SLOTS, 128), generator=generator).float()
        self.q = torch.randint(-3, 4, (rows, heads, 128), generator=generator).float()
        self.weights = torch.randint(-3, 4, (rows, heads), generator=generator).float()

    def expected(self, topk: int) -> torch.Tensor:
        parts, start = [], 0
        for request, (queries, keys) in enumerate(
            zip(self.batch.query_lens, self.batch.key_lens, strict=True)
        ):
            end = start + queries
            visible = torch.arange(keys - queries + 1, keys + 1)
            logits = indexer_logits(
                self.q[start:end],
                self.keys[self.batch.slots[request, :keys]],
                self.weights[start:end],
            )
            parts.append(reference_topk(logits, visible, topk))
            start = end
        return torch.cat(parts) if parts else torch.empty(0, topk, dtype=torch.int32)

    def got(self, topk: int, dtype: torch.dtype) -> torch.Tensor:
        keys = self.keys.to(dtype)
        return select.select_topk(
            self.q.to(dtype),
            self.weights,
            lambda slots: keys.index_select(0, slots),
            self.batch,
            topk,
        )


LENS = [
    [(1, 1)],
    [(7, 7)],
    [(64, 64)],
    [(65, 65)],
    [(64, 65)],  # all but the last row see at most k
    [(300, 300), (1, 500), (0, 0), (5, 400), (1, 3)],
    [(1, 2000), (1, 65), (1, 64), (1, 999)],
    [(40, 1100)],  # the newest chunk of a long prompt
]


@pytest.mark.parametrize("lens", LENS, ids=str)
@pytest.mark.parametrize("logits_bytes", [1, 50_000, 128 << 20])
def test_blocked_selection_is_the_obvious_one(
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
    lens: list[tuple[int, int]],
    logits_bytes: int,
) -> None:
    monkeypatch.setattr(select, "LOGITS_BYTES", logits_bytes)
    problem = Problem(lens, heads=4, generator=generator)
    expected = problem.expected(64)
    selected = problem.got(64, torch.float32)
    assert torch.equal(selected, expected)
    assert torch.equal(problem.got(64, torch.float32), selected)


@pytest.mark.parametrize("lens", LENS[4:], ids=str)
def test_bfloat16_keys_select_nearly_the_same(
    generator: torch.Generator, lens: list[tuple[int, int]]
) -> None:
    """Rounding may swap near-ties: what is selected instead scores within the rounding."""
    problem = Problem(lens, heads=4, generator=generator)
    expected, selected = problem.expected(64), problem.got(64, torch.bfloat16)
    start = 0
    for request, (queries, keys) in enumerate(lens):
        end = start + queries
        slots = problem.batch.slots[request, :keys]
        logits = indexer_logits(
            problem.q[start:end], problem.keys[slots], problem.weights[start:end]
        )
        for row in range(queries):
            mine, truth = set(selected[start + row].tolist()), set(expected[start + row].tolist())
            lost, won = sorted(truth - mine), sorted(mine - truth)
            assert len(lost) == len(won)
            # Every head's product is rounded to 8 bits before the weighted sum.
            bound = 2**-8 * float(logits[row].abs().max()) * 4
            for a, b in zip(lost, won, strict=True):
                assert float(logits[row, a] - logits[row, b]) <= bound
        start = end


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 150)), min_size=1, max_size=5),
    st.integers(1, 40),
    st.integers(0, 2**31),
)
def test_any_batch(pairs: list[tuple[int, int]], topk: int, seed: int) -> None:
    lens = [(queries, queries + context) for queries, context in pairs]
    problem = Problem(lens, heads=2, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(problem.got(topk, torch.float32), problem.expected(topk))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lens", [*LENS[5:], [(700, 700), (1, 90), (900, 1500)]], ids=str)
def test_shares_of_a_batch_select_what_the_whole_does(
    generator: torch.Generator, lens: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    """They do to the bit, also of numbers whose sums are rounded."""
    problem, topk = Problem(lens, heads=4, generator=generator), 64
    for tensor in (problem.q, problem.keys, problem.weights):
        tensor.normal_(generator=generator)
    whole, batch = problem.got(topk, dtype), problem.batch
    split = RowSplit.balanced(
        batch.query_lens, batch.key_lens, 3, free=topk, block=select.ROW_BLOCK
    )
    q, weights = problem.q, problem.weights
    for share in map(split.share, range(3)):
        problem.batch = batch.share(share)
        problem.q, problem.weights = q[share.rows], weights[share.rows]
        assert torch.equal(problem.got(topk, dtype), whole[share.rows])


def test_padded_rows_select_nothing(generator: torch.Generator) -> None:
    problem = Problem([(3, 90)], heads=2, generator=generator)
    problem.q = torch.cat([problem.q, torch.full((2, 2, 128), float("nan"))])
    problem.weights = torch.cat([problem.weights, torch.full((2, 2), float("nan"))])
    selected = problem.got(64, torch.float32)
    assert torch.equal(selected[:3], problem.expected(64))
    assert (selected[3:] == -1).all()


@pytest.mark.parametrize("lens", [[(1, 9), (1, 4)], [(3, 9), (0, 4), (1, 4)]])
def test_physical_slots(generator: torch.Generator, lens: list[tuple[int, int]]) -> None:
    batch = Problem(lens, heads=1, generator=generator).batch
    rows = batch.num_rows
    positions = torch.full((rows + 2, 6), -1, dtype=torch.int32)  # two rows of padding
    row = 0
    for queries, keys in lens:
        for _ in range(queries):
            places = torch.randperm(keys, generator=generator)[:4].sort().values
            positions[row, : len(places)] = places.to(torch.int32)
            row += 1
    slots = batch.physical_slots(positions)
    assert slots.dtype == torch.int32
    assert torch.equal(slots < 0, positions < 0)
    for row in range(rows):
        request = int(batch.request_of_row[row])
        for position, slot in zip(positions[row].tolist(), slots[row].tolist(), strict=True):
            assert position < 0 or slot == int(batch.slots[request, position])
