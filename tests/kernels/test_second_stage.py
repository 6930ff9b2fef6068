"""Selection among candidates: kernels in Triton's interpreter, held against float64 and sorting."""

from dataclasses import replace

import pytest
import torch

from sglang_indexcache.fold import IndexRow
from sglang_indexcache.fold import select as select_folded
from sglang_indexcache.kernels.contract import PADDING, IndexerBatch, logits_tolerance
from sglang_indexcache.kernels.indexer import fold, reference, second_stage
from sglang_indexcache.kernels.indexer.quantization import quantize_e4m3, write_pages
from sglang_indexcache.kernels.indexer.second_stage import SecondStage, largest
from sglang_indexcache.kernels.topk import reference as topk_reference
from tests.kernels.interpreted import output_of

HEADS, TOPK = 8, 16
interpreted = pytest.mark.skipif(not fold.INTERPRETED, reason="runs in Triton's interpreter")
DECODE = [[(70, 1), (1, 1), (300, 1)], [(200, 3), (66, 3)], [(150, 1)] * 18]
"""Requests: tokens, and how many of them are query rows."""
PREFILL = [[(140, 110)], [(64, 20), (5, 5), (333, 2)], [(40, 0), (129, 9), (20, 20)]]


def select_among(
    batch: IndexerBatch,
    topk: int,
    slopes: torch.Tensor,
    factor: int,
    *,
    as_slots: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Select as an indexer does, among the ``factor * topk`` best by the folded score.

    Args:
        slopes: ``[H]`` float32; the folded query is multiplied in float64.
        factor: how many times ``topk`` candidates.
    """
    if out is None:
        out = torch.empty(len(batch.q), topk, dtype=torch.int32, device=batch.q.device)
    out.fill_(PADDING)
    for request, rows in reference.requests(batch):
        longest, visible = int(batch.visible[rows].max()), batch.visible[rows]
        keys, scales = reference.request_keys(batch.pages, batch.block_table[request], longest)
        gates = batch.weights[rows].double() * slopes.double()
        query = torch.einsum("thd,th->td", batch.q[rows].double(), gates)
        folded = query @ (keys.double() * scales.double()[:, None]).T
        candidates = topk_reference.topk(folded, visible, factor * topk)
        exact = reference._scores(batch, request, rows)
        # Among candidates, which ascend, ties go to the smaller position as well.
        scores = exact.gather(1, candidates.clamp_min(0).long())
        chosen = topk_reference.topk(scores, (candidates >= 0).sum(1), topk)
        picks = candidates.gather(1, chosen.clamp_min(0).long()).masked_fill(chosen < 0, PADDING)
        if as_slots:
            picks = reference.slots_of(picks, batch.block_table[request]).to(torch.int32)
        out[rows] = picks
    return out


def draw_batch(
    requests: list[tuple[int, int]],
    *,
    decodes: bool = False,
    padding: int = 0,
    heads: int = HEADS,
) -> IndexerBatch:
    """Draw a batch whose pages lie anywhere; what no row may see is poisoned."""
    draw = torch.Generator().manual_seed(0)
    wide = max(-(-tokens // 64) for tokens, _ in requests) + 1
    free = torch.randperm(len(requests) * wide + 3, generator=draw)
    pages = torch.full((len(free), 64 * 132), 0x7F, dtype=torch.uint8)  # NaN in e4m3
    table = torch.full((len(requests), wide), 2**30, dtype=torch.int32)  # outside of any pool
    visible: list[int] = []
    for number, (tokens, rows) in enumerate(requests):
        own = free[number * wide :][: -(-tokens // 64)]
        table[number, : len(own)] = own
        keys = torch.randn(tokens, 128, generator=draw)
        # Triton's interpreter misreads e4m3's smallest numbers.
        values, scales = quantize_e4m3(keys.sign() * keys.abs().clamp_min(0.02))
        slots = reference.slots_of(torch.arange(tokens), table[number])
        write_pages(pages, slots, values, scales)
        visible += range(tokens - rows + 1, tokens + 1)
    rows = len(visible) + padding
    starts = torch.tensor([0, *(rows for _, rows in requests)]).cumsum(0).to(torch.int32)
    queries = torch.randn(rows, heads, 128, generator=draw)
    return IndexerBatch(
        quantize_e4m3(queries.sign() * queries.abs().clamp_min(0.02))[0],
        torch.randn(rows, heads, generator=draw),
        pages,
        table,
        torch.tensor([*visible, *[7] * padding], dtype=torch.int32),
        None if decodes else starts,
    )


def slopes(heads: int = HEADS) -> torch.Tensor:
    return torch.rand(heads, generator=torch.Generator().manual_seed(5))


def table_of(batch: IndexerBatch, row: int) -> torch.Tensor:
    """Return the pages of a row's request."""
    [owner] = [
        request for request, rows in reference.requests(batch) if rows.start <= row < rows.stop
    ]
    return batch.block_table[owner]


def scores_of(batch: IndexerBatch, row: int) -> tuple[torch.Tensor, ...]:
    """Return a row's folded and exact scores in float64, and how far a kernel's may be apart."""
    count = int(batch.visible[row])
    keys, scales = reference.request_keys(batch.pages, table_of(batch, row), count)
    wide, q = keys.double() * scales.double()[:, None], batch.q[row].double()
    query = (batch.weights[row].double() * slopes(len(q)).double()) @ q
    weights = batch.weights[row, :, None].double()
    exact = ((q @ wide.T).relu() * weights).sum(0)
    one = (batch.q[row : row + 1], keys, batch.weights[row : row + 1], scales)
    folded_error = query.abs() @ wide.abs().T * 2.0**-8
    return query @ wide.T, exact, folded_error, logits_tolerance(*one, bits=23)[0]


def poisoned(batch: IndexerBatch, topk: int) -> torch.Tensor:
    return torch.full((len(batch.q), topk), 123456789, dtype=torch.int32)


def check(batch: IndexerBatch, positions: torch.Tensor, factor: int, topk: int = TOPK) -> int:
    """Hold every row against float64; return how many rows had candidates to leave out."""
    left_out = 0
    padding = len(batch.q) if batch.query_starts is None else int(batch.query_starts[-1])
    assert (positions[padding:] == -1).all()
    for row, count in enumerate(batch.visible[:padding].tolist()):
        chosen = positions[row][positions[row] >= 0].long()
        assert len(chosen) == min(topk, count)
        assert (positions[row][len(chosen) :] == -1).all()
        assert (chosen[1:] > chosen[:-1]).all()
        assert len(chosen) == 0 or chosen[-1] < count
        if count <= topk:
            continue
        folded, exact, moved, error = scores_of(batch, row)
        # Sure to be a candidate, and sure to be none, however the folded query was rounded.
        least, most = folded - moved, folded + moved
        above = count - torch.searchsorted(least.sort().values, most, right=True)
        below = torch.searchsorted(most.sort().values, least)
        sure, never = below >= count - factor * topk, above >= factor * topk
        assert not never[chosen].any()
        left_out += int(never.sum() > 0)
        rest = sure.clone()
        rest[chosen] = False
        if rest.any():
            assert (exact - error)[rest].max() <= (exact + error)[chosen].min()
    return left_out


@interpreted
@pytest.mark.parametrize(
    ("requests", "decodes"), [*((r, False) for r in PREFILL), *((r, True) for r in DECODE)]
)
def test_a_row_selects_the_best_of_its_candidates(
    requests: list[tuple[int, int]], decodes: bool
) -> None:
    factor = 3 if len(requests) == 2 else 2
    batch = draw_batch(requests, decodes=decodes, padding=0 if decodes else 3)
    out = poisoned(batch, TOPK)
    assert SecondStage(slopes(), factor)(batch, TOPK, out=out) is out
    assert check(batch, out, factor) > 0


@interpreted
def test_candidates_that_hold_all_are_the_exact_selection() -> None:
    batch = draw_batch([(130, 30)])
    selected = SecondStage(slopes(), 16)(batch, TOPK)
    for row in range(30):
        _, exact, _, error = scores_of(batch, row)
        kept = torch.zeros(len(exact), dtype=torch.bool).index_fill(0, selected[row].long(), True)
        assert (exact - error)[~kept].max() <= (exact + error)[kept].min()


@interpreted
def test_slots_are_those_of_the_positions() -> None:
    for batch in (draw_batch(PREFILL[1], padding=3), draw_batch(DECODE[1], decodes=True)):
        stage = SecondStage(slopes(), 2)
        positions, slots = stage(batch, TOPK), stage(batch, TOPK, as_slots=True)
        for _, rows in reference.requests(batch):
            for row in range(rows.start, rows.stop):
                wanted = reference.slots_of(positions[row], table_of(batch, row))
                assert slots[row].tolist() == wanted.tolist()


@interpreted
def test_a_row_selects_the_same_alone_and_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, stage = draw_batch(PREFILL[1], padding=3), SecondStage(slopes(), 2)
    whole = stage(batch, TOPK)
    for low, high in ((0, 1), (19, 27), (26, 30)):
        assert torch.equal(stage(batch.part(low, high), TOPK), whole[low:high])
    monkeypatch.setattr(second_stage, "WORKSPACE_BYTES", 5 * stage._row_bytes(batch, TOPK))
    assert torch.equal(stage(batch, TOPK), whole)
    batch = draw_batch(DECODE[1], decodes=True)
    whole = stage(batch, TOPK)
    monkeypatch.setattr(second_stage, "WORKSPACE_BYTES", 4 * stage._row_bytes(batch, TOPK))
    assert torch.equal(stage(batch, TOPK), whole)


@interpreted
def test_a_batch_without_rows() -> None:
    batch = draw_batch([(40, 0)])
    assert SecondStage(slopes(), 2)(batch, TOPK).shape == (0, TOPK)


@interpreted
def test_it_is_transformers_reference_that_folds() -> None:
    """Compare it on rows, nearly all of which have no score within rounding of a boundary."""
    batch, rows, count = draw_batch([(300, 20)]), 20, 300
    keys, scales = reference.request_keys(batch.pages, batch.block_table[0], count)
    seen = torch.arange(count) < batch.visible[:, None]
    wide = (keys.float() * scales[:, None])[None]
    row = IndexRow(batch.q.float()[None], wide, batch.weights[None], seen[None])
    expected = select_folded(row, TOPK, slopes(), 2)[0]
    selected = SecondStage(slopes(), 2)(batch, TOPK)
    same = (selected == expected).all(1)
    assert same.sum() > rows * 3 // 4
    assert not torch.equal(expected, select_folded(row, TOPK, slopes())[0])
    assert not torch.equal(expected, select_folded(row, TOPK, None)[0])


@interpreted
@pytest.mark.parametrize("shape", [(3, 70), (2, 5000), (2, 9001), (1, 20000)])
@pytest.mark.parametrize("kind", ["normal", "ties", "equal", "signs", "infinite", "periodic"])
def test_the_largest_are_those_of_a_stable_sort(shape: tuple[int, int], kind: str) -> None:
    rows, width = shape
    draw = torch.Generator().manual_seed(width)
    scores = torch.randn(rows, width, generator=draw)
    if kind == "ties":
        scores = (scores * 4).round()
    elif kind == "equal":
        scores = torch.full_like(scores, -2.5)
    elif kind == "signs":
        scores = torch.where(scores > 0, 0.0, -0.0)
    elif kind == "infinite":
        scores = scores.masked_fill(scores > 2, torch.inf).masked_fill(scores < 0, -torch.inf)
    elif kind == "periodic":  # a sample sees what the others do not
        scores = (torch.arange(width) % max(width // second_stage.SAMPLE, 2)).expand(rows, -1) * 1.0
    visible = torch.tensor([width, width * 2 // 3, 1][:rows], dtype=torch.int32)
    scores = scores.contiguous()
    for row, count in enumerate(visible.tolist()):
        scores[row, count:] = torch.nan
    for count in (1, 64, 2048):
        found = largest(scores, visible, count)
        assert torch.equal(found, topk_reference.topk(scores, visible, count))


@interpreted
@pytest.mark.parametrize("held", [16, 64])
def test_a_sample_that_errs_costs_time_alone(monkeypatch: pytest.MonkeyPatch, held: int) -> None:
    """So few samples that the bracket often misses, or holds too little."""
    monkeypatch.setattr(second_stage, "SAMPLE", held)
    draw = torch.Generator().manual_seed(held)
    scores = torch.randn(12, 1000, generator=draw)
    visible = torch.randint(1, 1001, (12,), generator=draw, dtype=torch.int32)
    for count in (3, 100):
        found = largest(scores, visible, count)
        assert torch.equal(found, topk_reference.topk(scores, visible, count))


def test_the_oracle_among_all_tokens_selects_exactly() -> None:
    batch = draw_batch(PREFILL[1], padding=3)
    among = select_among(batch, TOPK, slopes(), 64)
    assert torch.equal(among, reference.select(batch, TOPK))
    few = replace(batch, visible=batch.visible.clamp(max=2 * TOPK))
    among = select_among(few, TOPK, slopes(), 2)
    assert torch.equal(among, reference.select(few, TOPK))


def test_triton_passes_the_same_tests_in_its_interpreter() -> None:
    output = output_of(__file__)
    assert " passed, 1 deselected" in output, output[-3000:]
    assert "failed" not in output
    assert "skipped" not in output
