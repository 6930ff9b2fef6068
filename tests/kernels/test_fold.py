"""The folded query of a kernel against float64: as heads, as one product, and as a selection."""

import pytest
import torch

from sglang_indexcache.fold import IndexRow
from sglang_indexcache.fold import select as select_folded
from sglang_indexcache.kernels.contract import IndexerBatch
from sglang_indexcache.kernels.indexer import fold, reference
from sglang_indexcache.kernels.indexer.quantization import quantize_e4m3, write_pages
from tests.kernels.interpreted import output_of

COMPONENT = 2.0**-8


def draw_inputs(rows: int, heads: int, count: int) -> tuple[torch.Tensor, ...]:
    """Draw queries, weights of both signs, slopes, keys and their scales."""
    generator = torch.Generator().manual_seed(rows * 1000 + count)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    q, keys = quantize_e4m3(normal(rows, heads, 128))[0], normal(count, 128)
    # Triton's interpreter misreads e4m3's smallest numbers.
    values, scales = quantize_e4m3(keys.sign() * keys.abs().clamp_min(0.02))
    slopes = torch.rand(heads, generator=generator)
    return q, normal(rows, heads), slopes, values, scales


def exact_query(q: torch.Tensor, weights: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
    """Fold in float64; the largest component becomes e4m3's largest number."""
    query = torch.einsum("thd,th->td", q.double(), weights.double() * slopes.double())
    return query * (448 / query.abs().amax(-1, keepdim=True).clamp_min(1e-30))


@pytest.mark.parametrize(("rows", "heads", "count"), [(1, 32, 8), (5, 64, 64), (130, 8, 32)])
def test_heads_score_as_the_folded_query_does(rows: int, heads: int, count: int) -> None:
    q, weights, slopes, keys, scales = draw_inputs(rows, heads, 70)
    folded, signs = fold.folded_heads(q, weights, slopes, count)
    assert folded.shape == (rows, count, 128)
    products = torch.einsum("thd,sd->ths", folded.double(), keys.double())
    scores = torch.einsum("ths,th->ts", products.relu(), signs.double()) * scales.double()
    query, wide = exact_query(q, weights, slopes), keys.double() * scales.double()[:, None]
    assert ((scores - query @ wide.T).abs() <= query.abs() @ wide.abs().T * COMPONENT).all()


@pytest.mark.parametrize(("rows", "count"), [(1, 1), (5, 130), (130, 300), (0, 64)])
def test_the_product_is_that_of_float64(rows: int, count: int) -> None:
    q, weights, slopes, keys, scales = draw_inputs(rows, 32, count)
    folded, signs = fold.folded_heads(q, weights, slopes)
    starts = torch.zeros(rows, dtype=torch.int32)
    logits = fold.product(folded, (keys, scales), signs, starts, starts + count)
    assert logits.shape == (rows, count)
    query, wide = exact_query(q, weights, slopes), keys.double() * scales.double()[:, None]
    bound = query.abs() @ wide.abs().T * COMPONENT
    assert ((logits.double() - query @ wide.T).abs() <= bound).all()


def test_a_row_that_folds_to_nothing_scores_zero() -> None:
    q, weights, slopes, keys, scales = draw_inputs(3, 32, 64)
    weights[1] = 0
    folded, signs = fold.folded_heads(q, weights, slopes)
    starts = torch.zeros(3, dtype=torch.int32)
    logits = fold.product(folded, (keys, scales), signs, starts, starts + 64)
    assert (logits[1] == 0).all()
    assert logits[[0, 2]].abs().min() > 0


def test_what_deep_gemm_would_clean_is_refused() -> None:
    q, weights, _, keys, scales = draw_inputs(1, 8, 64)
    ends = torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="no row sees"):
        fold.product(q, (keys, scales), weights, ends, ends, clean_logits=True)


def test_a_kernel_for_heads_selects_as_transformers_reference_folds() -> None:
    """Compare the rows whose scores lie further apart than the query's rounding."""
    rows, topk, count = 6, 16, 128
    q, weights, slopes, keys, scales = draw_inputs(rows, 32, count)
    visible = torch.arange(count - rows + 1, count + 1, dtype=torch.int32)
    pages = torch.zeros(2, 64 * 132, dtype=torch.uint8)
    write_pages(pages, torch.arange(count), keys, scales)
    folded, signs = fold.folded_heads(q, weights, slopes)
    batch = IndexerBatch(
        folded,
        signs,
        pages,
        torch.tensor([[0, 1]], dtype=torch.int32),
        visible,
        torch.tensor([0, rows], dtype=torch.int32),
    )
    is_visible = torch.arange(count) < visible[:, None]
    wide = keys.float() * scales[:, None]
    row = IndexRow(q.float()[None], wide[None], weights[None], is_visible[None])
    expected = select_folded(row, topk, slopes)[0]
    selected = reference.select(batch, topk)
    exact = exact_query(q, weights, slopes) @ wide.double().T
    kth = exact.masked_fill(~is_visible, -torch.inf).topk(topk + 1).values
    apart = (kth[:, -2] - kth[:, -1]) > exact.abs().amax(-1) * COMPONENT
    assert apart.sum() >= rows // 2
    assert torch.equal(selected[apart], expected[apart])


def test_triton_passes_the_same_tests_in_its_interpreter() -> None:
    output = output_of(__file__)
    assert "10 passed, 1 deselected" in output, output[-3000:]
