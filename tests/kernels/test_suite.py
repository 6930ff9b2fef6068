"""The shared suite finds what real kernels get wrong: each mutant of the reference is caught."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch

from sglang_indexcache.kernels.contract import IndexerBatch
from sglang_indexcache.kernels.indexer import reference as indexer
from sglang_indexcache.kernels.indexer.reference import FLOAT32_BITS
from sglang_indexcache.kernels.sparse_mla import cuda
from sglang_indexcache.kernels.sparse_mla import reference as sparse_mla
from tests.kernels.grid import cases, suite

CPU = torch.device("cpu")


def larger_tie(logits: torch.Tensor, visible: torch.Tensor, k: int) -> torch.Tensor:
    """Ties to the larger position."""
    rows = []
    for row, limit in zip(logits, visible.tolist(), strict=True):
        order = (row[:limit] + 0.0).flip(0).sort(descending=True, stable=True).indices[:k]
        order_kept = (limit - 1 - order).sort().values
        rows.append(torch.nn.functional.pad(order_kept, (0, k - len(order_kept)), value=-1))
    return torch.stack(rows).int()


def signed_zeros(logits: torch.Tensor, visible: torch.Tensor, k: int) -> torch.Tensor:
    """Radix keys that tell -0 from +0."""
    bits = logits.contiguous().view(torch.int32)
    keys = torch.where(bits < 0, -(bits & 0x7FFFFFFF) - 1, bits)
    return indexer.topk(keys.double(), visible, k)


def descending(logits: torch.Tensor, visible: torch.Tensor, k: int) -> torch.Tensor:
    rows = indexer.topk(logits, visible, k)
    return rows.flip(1)


def reads_on(logits: torch.Tensor, visible: torch.Tensor, k: int) -> torch.Tensor:
    """Select from one column too many."""
    wider = logits.as_strided((len(logits), logits.shape[1] + 1), logits.stride())
    return indexer.topk(wider, (visible + 1).clamp_max(wider.shape[1]), k)


def drops_overflow(logits: torch.Tensor, visible: torch.Tensor, k: int) -> torch.Tensor:
    """Look at only so many candidates of the threshold's bin (SGLang's legacy top-k)."""
    return indexer.topk(logits, visible.clamp_max(400), k)


def into_out(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def wrapped(*arguments: Any, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(function(*arguments))

    return wrapped


@pytest.mark.parametrize("mutant", [larger_tie, signed_zeros, descending, reads_on, drops_overflow])
def test_topk_mutants(mutant: Callable[..., torch.Tensor], generator: torch.Generator) -> None:
    logits, visible = cases.topk_inputs(cases.TopKCase(700, 64), generator, CPU)
    assert suite.check_topk(indexer.topk, logits, visible, 64) == []
    assert suite.check_topk(into_out(mutant), logits, visible, 64)


def test_a_write_outside_is_seen(generator: torch.Generator) -> None:
    def careless(*arguments: Any, out: torch.Tensor) -> torch.Tensor:
        out.as_strided((1,), (1,), out.storage_offset() + out.numel()).fill_(0)
        return indexer.topk(*arguments, out=out)

    logits, visible = cases.topk_inputs(cases.TopKCase(63, 64), generator, CPU)
    complaints = suite.check_topk(careless, logits, visible, 64)
    assert any("outside" in complaint for complaint in complaints)


def test_what_is_not_written_is_seen(generator: torch.Generator) -> None:
    def forgets(logits: torch.Tensor, *arguments: Any, out: torch.Tensor) -> torch.Tensor:
        out[:-1] = indexer.topk(logits, *arguments)[:-1]
        return out

    logits, visible = cases.topk_inputs(cases.TopKCase(63, 64), generator, CPU)
    assert suite.check_topk(forgets, logits, visible, 64)


def mutated(change: Callable[[IndexerBatch], None], function: Any) -> Any:
    """Return ``function`` on a changed batch."""

    def wrapped(batch: IndexerBatch, *arguments: Any, **options: Any) -> Any:
        changed = deepcopy(batch)
        change(changed)
        return function(changed, *arguments, **options)

    return wrapped


def drop_a_head(batch: IndexerBatch) -> None:
    batch.weights[:, -1] = 0


def forget_a_scale(batch: IndexerBatch) -> None:
    batch.pages.view(torch.float32)[:, -64:] = 1.0


def see_one_more(batch: IndexerBatch) -> None:
    batch.visible.add_((batch.visible < batch.visible.max()).int())


@pytest.mark.parametrize("number", [1, 7])
@pytest.mark.parametrize("change", [drop_a_head, forget_a_scale])
def test_wrong_logits(change: Any, number: int, generator: torch.Generator) -> None:
    """The selection is the top-k of the wrong logits, so only they betray it."""
    case = cases.PREFILL[number]
    inputs = cases.indexer_inputs(case, generator, CPU)
    logits = mutated(change, indexer.logits)
    select = mutated(change, indexer.select)
    complaints = suite.check_indexer(logits, select, case, inputs, FLOAT32_BITS)
    assert any(complaint.startswith("logits") for complaint in complaints)


# One more token is always selected where a row sees fewer than k.
@pytest.mark.parametrize(
    ("change", "number"), [(drop_a_head, 10), (forget_a_scale, 10), (see_one_more, 1)]
)
def test_wrong_selection(change: Any, number: int, generator: torch.Generator) -> None:
    case = cases.PREFILL[number]
    inputs = cases.indexer_inputs(case, generator, CPU)
    select = mutated(change, indexer.select)
    complaints = suite.check_indexer(indexer.logits, select, case, inputs, FLOAT32_BITS)
    assert any(complaint.startswith("select") for complaint in complaints)


def test_a_rounded_logit_is_too_far(generator: torch.Generator) -> None:
    """Rounding logits to bfloat16 is beyond the tolerance even of Hopper's FP8 unit."""

    def rounded(*arguments: Any, **options: Any) -> torch.Tensor:
        logits = indexer.logits(*arguments, **options)
        return logits.copy_(logits.bfloat16())

    case = cases.PREFILL[10]
    inputs = cases.indexer_inputs(case, generator, CPU)
    complaints = suite.check_indexer(rounded, indexer.select, case, inputs, FLOAT32_BITS)
    assert any("tolerance" in complaint for complaint in complaints)


def wrong_scale(q: Any, cache: Any, slots: Any, scale: float, **options: Any) -> Any:
    return sparse_mla.sparse_mla(q, cache, slots, scale * 1.02, **options)


def pads_with_row_0(q: Any, cache: Any, slots: Any, scale: float, **options: Any) -> Any:
    return sparse_mla.sparse_mla(q, cache, slots.clamp_min(0), scale, **options)


def skips_one(q: Any, cache: Any, slots: Any, scale: float, **options: Any) -> Any:
    fewer = slots.clone()
    heaviest = cache[slots[0].long()].float().norm(dim=1).argmax()  # a light one may not show
    fewer[0, heaviest] = -1
    return sparse_mla.sparse_mla(q, cache, fewer, scale, **options)


def no_sinks(*arguments: Any, sinks: Any, **options: Any) -> Any:
    return sparse_mla.sparse_mla(*arguments, **options)


def base_2_lse(*arguments: Any, **options: Any) -> Any:
    out, lse = sparse_mla.sparse_mla(*arguments, **options)
    return out, lse.mul_(1.4426950408889634)


@pytest.mark.parametrize("mutant", [wrong_scale, pads_with_row_0, skips_one, no_sinks, base_2_lse])
def test_attention_mutants(mutant: Any, generator: torch.Generator) -> None:
    inputs = cases.attention_inputs(cases.ATTENTION[1], generator, CPU)
    assert suite.check_sparse_mla(sparse_mla.sparse_mla, inputs) == []
    assert suite.check_sparse_mla(mutant, inputs)


def test_the_grid_takes_every_way_that_attention_has_on_an_h100() -> None:
    """Eight, four, three and two rows a tile, or one; lists split over clusters of any size."""
    # Clusters lie within one of its GPCs: how many multiprocessors each has is assumed, but that 15
    # clusters of 8 run at once is published.
    gpcs = (18, 18, 18, 16, 16, 16, 16, 14)

    def clusters(size: int) -> int:
        return sum(gpc // size for gpc in gpcs)

    packed, split = set(), set()
    for case in (*cases.WIDE_ATTENTION, *cases.LARGE_ATTENTION):
        rows, shape = len(case.counts), (case.heads, case.topk)
        packed.add((case.heads, cuda.rows_per_tile(rows, *shape, sum(gpcs))))
        if case.heads == 8:
            split.add(
                (
                    rows,
                    cuda.cluster_size(rows, *shape, clusters),
                )
            )
    assert {(5, 8), (8, 8), (16, 4), (20, 3), (32, 2), (100, 1)} <= packed
    assert {(16, 7), (32, 3)} <= split, "what 16 and 32 requests take in decode"
