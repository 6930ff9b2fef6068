"""The Triton form of the sparse loss against the float64 form of the package.

``tests/kernels/test_triton_interpreted.py`` runs this file under Triton's interpreter.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from random import randrange
from unittest.mock import patch

import pytest
import torch

from benchmarks.card import loss
from sglang_indexcache.adapter import Adapter
from sglang_indexcache.errors import TrainingError
from sglang_indexcache.heal import losses_triton
from sglang_indexcache.heal.heal import heal
from sglang_indexcache.heal.losses import (
    AttentionInputs,
    IndexInputs,
    LossKernel,
    distillation_loss,
    multi_layer_loss,
    select_top_k,
)
from sglang_indexcache.heal.packing import Layout
from tests.heal.checkpoints import checkpoint
from tests.heal.test_heal import options, same_first_step

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
runs = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU or TRITON_INTERPRET=1"
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Shape:
    """Of one layer: batch, tokens, index heads and width, heads, key heads, width, selected."""

    B: int = 2
    T: int = 11
    H: int = 3
    D: int = 5
    N: int = 2
    G: int = 2
    W: int = 6
    k: int = 4


SHAPES = [
    Shape(),
    Shape(B=1, T=1, k=1),
    Shape(H=1, N=1, G=1, k=3),
    Shape(B=1, N=3, G=1, k=7),  # MQA keys
    Shape(B=1, T=7, N=4, W=33, D=17, k=5),  # widths that are no powers of two
    Shape(B=1, T=66, H=2, D=80, k=65, N=1, G=1),  # more than one tile of keys and of columns
    Shape(B=1, T=5, H=17, k=2),  # more heads than the smallest product has
    Shape(B=1, T=9, k=9),  # every key
]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    seed = int(os.environ.get("INDEXCACHE_TEST_SEED", randrange(2**31)))
    print(f"INDEXCACHE_TEST_SEED={seed}")
    torch.manual_seed(seed)


def inputs(
    shape: Shape, dtype: torch.dtype = torch.float32
) -> tuple[IndexInputs, list[AttentionInputs], Layout]:
    """Two served layers; padding, and two documents in the first row."""
    s = shape
    sizes = ((s.B, s.T, s.H, s.D), (s.B, s.T, s.D), (s.B, s.T, s.H))
    index = IndexInputs(*(torch.randn(z, device=DEVICE).to(dtype) for z in sizes))
    attentions = [
        AttentionInputs(
            torch.randn(s.B, s.N, s.T, s.W, device=DEVICE).to(dtype),
            torch.randn(s.B, s.G, s.T, s.W, device=DEVICE).to(dtype),
            s.W**-0.5,
        )
        for _ in range(2)
    ]
    documents = torch.zeros(s.B, s.T, dtype=torch.int64, device=DEVICE)
    documents[0, s.T // 3 :] = 1
    documents[0, s.T - s.T // 5 :] = -1
    return index, attentions, Layout(documents)


def double(x: torch.Tensor) -> torch.Tensor:
    return x.double()


def both(
    index: IndexInputs,
    attentions: list[AttentionInputs],
    layout: Layout,
    selected: torch.Tensor,
    block: int = 8,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Value and gradients in Triton, and of the same numbers in float64."""
    found = []
    for triton, change in ((True, torch.clone), (False, double)):
        parts = [change(part).requires_grad_() for part in vars(index).values()]
        targets = [AttentionInputs(change(a.queries), change(a.keys), a.scale) for a in attentions]
        loss = multi_layer_loss(
            IndexInputs(*parts), targets, layout, selected, block, triton=triton
        )
        found.append([loss, *torch.autograd.grad(3.0 * loss, parts)])
    return found[0], found[1]


def agree(got: list[torch.Tensor], want: list[torch.Tensor], rtol: float, atol: float) -> None:
    for one, other in zip(got, want, strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one.double(), other, rtol=rtol, atol=atol)


@runs
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_value_and_gradients(shape: Shape) -> None:
    index, attentions, layout = inputs(shape)
    selected = select_top_k(index, layout, shape.k)
    agree(*both(index, attentions, layout, selected, block=16), rtol=1e-4, atol=1e-5)


@runs
def test_a_width_that_is_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with thousands of keys, of which a program holds few columns at a time."""
    monkeypatch.setattr(losses_triton, "TILE", 16)
    index, attentions, layout = inputs(Shape(T=6, D=37, W=21, k=3))
    selected = select_top_k(index, layout, 3)
    agree(*both(index, attentions, layout, selected), rtol=1e-4, atol=1e-5)


@runs
def test_bfloat16_is_computed_in_float32() -> None:
    """The value comes out in float32; a gradient has the dtype of its input, so one rounding."""
    index, attentions, layout = inputs(Shape(), torch.bfloat16)
    selected = select_top_k(index, layout, 4)
    got, want = both(index, attentions, layout, selected)
    assert got[0].dtype == torch.float32
    assert {g.dtype for g in got[1:]} == {torch.bfloat16}
    agree(got[:1], want[:1], rtol=1e-5, atol=1e-6)
    # Two terms are added up in bfloat16 by autograd, each with a rounding of its own.
    scale = max(w.abs().max().item() for w in want[1:])
    agree(got[1:], want[1:], rtol=2**-6, atol=2**-8 * scale)


@runs
def test_the_mean_of_several_targets() -> None:
    index, attentions, layout = inputs(Shape())
    selected = select_top_k(index, layout, 4)
    got = distillation_loss(index, attentions, layout, selected, triton=True)
    wide = IndexInputs(*map(double, vars(index).values()))
    targets = [AttentionInputs(double(a.queries), double(a.keys), a.scale) for a in attentions]
    agree([got], [distillation_loss(wide, targets, layout, selected)], rtol=1e-5, atol=1e-5)


@runs
def test_rows_without_a_key_have_no_loss() -> None:
    index, attentions, layout = inputs(Shape())
    selected = select_top_k(index, layout, 4)
    selected[:, 3] = -1  # nothing selected
    selected[1, 5] = 9  # nothing that it may see
    selected[1, 6, 1:] = -1  # a single key: q and p are 1
    got, want = both(index, attentions, layout, selected)
    agree(got, want, rtol=1e-4, atol=1e-5)
    for gradient in (got[1][:, 3], got[1][1, 5], got[3][:, 3]):
        assert not gradient.any()
    nothing = torch.full_like(selected, -1)
    for found in both(index, attentions, layout, nothing)[0]:
        assert not found.any()


@runs
def test_far_apart_scores() -> None:
    """Probabilities that underflow, on both sides, and index scores that are all 0."""
    index, attentions, layout = inputs(Shape())
    steep = [AttentionInputs(a.queries * 300, a.keys, a.scale) for a in attentions]
    selected = select_top_k(index, layout, 4)
    agree(*both(index, steep, layout, selected), rtol=1e-4, atol=1e-4)
    far = IndexInputs(index.queries * 30, index.keys, index.weights * 30)
    agree(*both(far, attentions, layout, selected), rtol=1e-4, atol=1e-2)
    dead = IndexInputs(-index.queries.abs(), index.keys.abs(), index.weights)
    got, want = both(dead, attentions, layout, selected)
    agree(got, want, rtol=1e-4, atol=1e-5)
    assert not any(g.any() for g in got[1:])


@runs
def test_scores_of_minus_infinity() -> None:
    """A key that the attention cannot reach, and that q gives nothing to, adds nothing."""
    index, attentions, layout = inputs(Shape(H=1))
    index.queries.abs_()
    index.keys.abs_()
    index.weights.fill_(-1.0)
    selected = select_top_k(index, layout, 4)
    place = int(selected[1, 10, -1])
    index.keys[1, place] = 1e38  # its score overflows
    queries = [a.queries.abs() for a in attentions]
    keys = [a.keys.clone() for a in attentions]
    for one in keys:
        one[1, :, place] = -1e38
    attentions = [
        AttentionInputs(q, k, a.scale) for q, k, a in zip(queries, keys, attentions, strict=True)
    ]
    loss = multi_layer_loss(index, attentions, layout, selected, triton=True)
    assert loss.isfinite()


@runs
def test_views_are_read_where_they_lie() -> None:
    index, attentions, layout = inputs(Shape())
    turned = [
        AttentionInputs(
            a.queries.transpose(1, 2).contiguous().transpose(1, 2),
            a.keys.transpose(-1, -2).contiguous().transpose(-1, -2),
            a.scale,
        )
        for a in attentions
    ]
    selected = select_top_k(index, layout, 4)
    straight = multi_layer_loss(index, attentions, layout, selected, triton=True)
    assert torch.equal(multi_layer_loss(index, turned, layout, selected, triton=True), straight)


@runs
def test_float64_is_refused() -> None:
    index, attentions, layout = inputs(Shape(), torch.float64)
    selected = select_top_k(index, layout, 4)
    with pytest.raises(TrainingError, match="index queries are float64"):
        distillation_loss(index, attentions, layout, selected, triton=True)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter takes tensors on the CPU")
def test_a_cpu_is_refused() -> None:
    index, attentions, layout = inputs(Shape())
    index = IndexInputs(*(part.cpu() for part in vars(index).values()))
    layout = Layout(layout.documents.cpu())
    selected = select_top_k(index, layout, 4)
    with pytest.raises(TrainingError, match="index queries are on the CPU"):
        distillation_loss(index, attentions, layout, selected, triton=True)


@runs
def test_healing_by_it_takes_the_same_step(tmp_path: Path) -> None:
    """The switch reaches the loss of every layer, and the adapter says so."""
    checkpoint(tmp_path / "base")
    for kernel in LossKernel:
        output = tmp_path / kernel
        small = {"length": 12, "rows": 1, "held_out": 1, "dense_steps": 0, "sparse_steps": 1}
        with patch.object(losses_triton, "divergence", wraps=losses_triton.divergence) as ran:
            heal(options(tmp_path, output=output, loss_kernel=kernel.value, **small))
        assert ran.called == (kernel is LossKernel.TRITON)
        assert Adapter.read(output).record["options"]["loss_kernel"] == kernel
    same_first_step(tmp_path / "torch", tmp_path / "triton", rel=1e-3)


@runs
@pytest.mark.parametrize("case", loss.TINY, ids=str)
def test_what_a_card_will_be_asked(case: loss.Case) -> None:
    """The check's own inputs and comparison, which a dry run gives a stand-in."""
    found = loss.difference(case, loss.by_triton, DEVICE)
    assert max(found.values()) <= loss.TOLERANCE[case.dtype], found


def test_the_warm_up_form_is_the_other() -> None:
    """It has no Triton form, so the switch changes nothing, on a CPU either."""
    index, attentions, layout = inputs(Shape())
    assert torch.equal(
        distillation_loss(index, attentions, layout, triton=True),
        distillation_loss(index, attentions, layout),
    )
