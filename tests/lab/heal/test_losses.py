"""The losses against a dense float64 computation that shares no code with them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from sglang_indexcache.errors import TrainingError
from sglang_indexcache.kernels.indexer import reference
from sglang_indexcache.lab.heal import losses
from sglang_indexcache.lab.heal.losses import (
    AttentionInputs,
    IndexInputs,
    captured_mass,
    distillation_loss,
    multi_layer_loss,
    select_top_k,
)
from sglang_indexcache.lab.heal.packing import Layout

B, T, H, D, N, W = 2, 19, 3, 5, 4, 6
K, FEW = 4, 2
"""Selected keys: so many of T that all are scored and masked; so few that they are gathered."""
BORDER = 8
assert T // BORDER in range(FEW, K)


@pytest.fixture(autouse=True)
def both_forms_occur(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let both forms occur in rows this short, where the package would always mask."""
    monkeypatch.setattr(losses, "GATHERED_FROM", BORDER)


def random_index(dtype: torch.dtype = torch.float64, grad: bool = True) -> IndexInputs:
    shapes = ((B, T, H, D), (B, T, D), (B, T, H))
    return IndexInputs(*(torch.randn(s, dtype=dtype).requires_grad_(grad) for s in shapes))


def random_attention(dtype: torch.dtype = torch.float64) -> AttentionInputs:
    queries, keys = (torch.randn(B, N, T, W, dtype=dtype) for _ in range(2))
    return AttentionInputs(queries, keys, W**-0.5)


def packed() -> Layout:
    """Return two documents and padding in one row, one document in the other."""
    documents = torch.zeros(B, T, dtype=torch.int64)
    documents[0, 7:] = 1
    documents[0, 15:] = -1
    return Layout(documents)


def gradients(loss: torch.Tensor, index: IndexInputs) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, [index.queries, index.keys, index.weights]))


def dense_oracle(
    index: IndexInputs,
    targets: Sequence[AttentionInputs],
    layout: Layout,
    selected: torch.Tensor | None,
) -> torch.Tensor:
    """KL(mean of the targets' p || q) in float64, every score at once, left to autograd.

    A query without any key is left out.
    """
    queries, keys, weights = (x.double() for x in vars(index).values())
    rows, length = layout.documents.shape
    allowed = torch.zeros(rows, length, length, dtype=torch.bool)
    for b in range(rows):
        for t in range(length):
            places = range(length) if selected is None else selected[b, t].tolist()
            for s in places:
                is_same_document = layout.documents[b, max(s, 0)] == layout.documents[b, t] != -1
                allowed[b, t, s] |= 0 <= s <= t and bool(is_same_document)
    products = []
    for target in targets:
        copies = target.queries.shape[1] // target.keys.shape[1]
        attended = target.keys.double().repeat_interleave(copies, dim=1)
        products_of_all = torch.einsum("bntd,bnsd->bnts", target.queries.double(), attended)
        products.append(products_of_all * target.scale)
    dots = torch.relu(torch.einsum("bthd,bsd->bths", queries, keys))
    scores = torch.einsum("bth,bths->bts", weights, dots)
    total = torch.zeros((), dtype=torch.float64)
    for b, t in allowed.any(-1).nonzero().tolist():
        use = allowed[b, t]
        p = torch.stack([product[b, :, t, use].softmax(-1).mean(0) for product in products]).mean(0)
        total = total + (p * (p.log() - scores[b, t, use].log_softmax(-1))).sum()
    return total


@pytest.mark.parametrize("topk", [None, K, FEW], ids=["warmup", "masked", "gathered"])
@pytest.mark.parametrize("block", [1, 4, 7, 100])
def test_both_forms_equal_the_dense_oracle(topk: int | None, block: int) -> None:
    index, targets, layout = random_index(), [random_attention() for _ in range(3)], packed()
    selected = select_top_k(index, layout, topk, block) if topk else None
    losses = [dense_oracle(index, [target], layout, selected) for target in targets]
    for loss, expected in (
        (multi_layer_loss(index, targets, layout, selected, block), torch.stack(losses).mean()),
        (
            distillation_loss(index, targets, layout, selected, block),
            dense_oracle(index, targets, layout, selected),
        ),
    ):
        torch.testing.assert_close(loss, expected)
        for gradient, want in zip(gradients(loss, index), gradients(expected, index), strict=True):
            torch.testing.assert_close(gradient, want)


@pytest.mark.parametrize("topk", [None, K, FEW], ids=["warmup", "masked", "gathered"])
@pytest.mark.parametrize("block", [1, 4, 100])
def test_some_queries_of_a_row_add_what_they_add_among_all(topk: int | None, block: int) -> None:
    index, target, layout = random_index(), random_attention(), packed()
    places = torch.tensor([0, 3, 8, 9, 16, 18])
    few = Layout(layout.documents, places)
    few_inputs = IndexInputs(index.queries[:, places], index.keys, index.weights[:, places])
    few_targets = AttentionInputs(target.queries[:, :, places], target.keys, target.scale)
    selected = select_top_k(index, layout, topk, block) if topk else None
    few_selected = select_top_k(few_inputs, few, topk, block) if topk else None
    if selected is not None:
        assert few_selected is not None
        assert few_selected.equal(selected[:, places])
    loss = distillation_loss(few_inputs, [few_targets], few, few_selected, block)
    unselected = torch.ones(T, dtype=torch.bool)
    unselected[places] = False
    nobody = selected if selected is not None else every_visible(layout)
    nobody = nobody.masked_fill(unselected[:, None], -1)  # the others select nothing: no loss
    expected = dense_oracle(index, [target], layout, nobody)
    torch.testing.assert_close(loss, expected)
    for gradient, want in zip(gradients(loss, index), gradients(expected, index), strict=True):
        torch.testing.assert_close(gradient, want)
    mass, queries = captured_mass(few_targets, few, nobody[:, places][..., :FEW], block)
    assert queries <= len(places) * B
    assert mass <= queries


def every_visible(layout: Layout) -> torch.Tensor:
    """Return ``[B, T, T]``: every key, as if selected; the oracle leaves out the unseen ones."""
    return torch.arange(T).expand(*layout.documents.shape, T)


SHAPES = [
    # rows, tokens, index heads, width, heads, key heads, width, selected, block
    (1, 1, 1, 1, 1, 1, 1, 1, 1),
    (3, 17, 1, 7, 3, 3, 5, 2, 5),
    (2, 33, 5, 3, 6, 2, 4, 4, 32),
    (1, 41, 2, 9, 7, 1, 3, 5, 40),
    (2, 26, 4, 1, 2, 1, 1, 1, 3),
    (1, 24, 3, 8, 4, 4, 6, 24, 100),
]


@pytest.mark.parametrize("form", ["warmup", "sparse"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_odd_shapes_equal_the_dense_oracle(shape: tuple[int, ...], form: str) -> None:
    rows, length, heads, width, n, key_heads, d, topk, block = shape
    sizes = ((rows, length, heads, width), (rows, length, width), (rows, length, heads))
    index = IndexInputs(*(torch.randn(s, dtype=torch.float64).requires_grad_() for s in sizes))
    attention = (torch.randn(rows, h, length, d, dtype=torch.float64) for h in (n, key_heads))
    target = AttentionInputs(*attention, 0.7)
    layout = Layout(torch.randint(0, 3, (rows, length)).sort(-1).values - 1)  # -1 is padding
    selected = select_top_k(index, layout, topk, block) if form == "sparse" else None
    loss = distillation_loss(index, [target], layout, selected, block)
    expected = dense_oracle(index, [target], layout, selected)
    torch.testing.assert_close(loss, expected)
    if expected.requires_grad:  # not if every row is padding
        for gradient, want in zip(gradients(loss, index), gradients(expected, index), strict=True):
            torch.testing.assert_close(gradient, want)


BFLOAT16_ROUNDING = 2**-8
"""Relative error of rounding once to 8 significant bits."""


@pytest.mark.parametrize("topk", [None, 16], ids=["warmup", "gathered"])
def test_key_gradients_of_512_blocks_in_bfloat16_are_rounded_once(topk: int | None) -> None:
    """Summed in bfloat16 they were off by some 2 %; float32 leaves the rounding of the result."""
    length = 1024
    shapes = ((1, length, 2, 16), (1, length, 16), (1, length, 2))
    index = IndexInputs(*(torch.randn(s).bfloat16().requires_grad_() for s in shapes))
    target = AttentionInputs(*(torch.randn(1, 2, length, 8).bfloat16() for _ in range(2)), 0.4)
    layout = Layout(torch.zeros(1, length, dtype=torch.int64))
    selected = select_top_k(index, layout, topk) if topk else None
    mine_all = gradients(distillation_loss(index, [target], layout, selected, block=2), index)
    wide = IndexInputs(*(x.detach().double().requires_grad_() for x in vars(index).values()))
    precise = AttentionInputs(target.queries.double(), target.keys.double(), target.scale)
    # One block in float64 is held against autograd by the tests above.
    want = gradients(distillation_loss(wide, [precise], layout, selected, block=length), wide)
    for mine, exact in zip(mine_all, want, strict=True):
        assert mine.dtype == torch.bfloat16
        assert (mine.double() - exact).norm() <= BFLOAT16_ROUNDING * exact.norm()


@pytest.mark.parametrize("topk", [K, FEW], ids=["masked", "gathered"])
def test_queries_that_selected_nothing_have_no_loss_and_no_gradient(topk: int) -> None:
    """All -1, as engines give for padding; and a selection of which nothing is visible."""
    index, target, layout = random_index(), random_attention(), packed()
    selected = select_top_k(index, layout, topk, 5)
    selected[0, 3] = -1
    selected[1, 5] = torch.arange(T - topk, T)
    loss = distillation_loss(index, [target], layout, selected, block=4)
    expected = dense_oracle(index, [target], layout, selected)
    torch.testing.assert_close(loss, expected)
    computed = gradients(loss, index)
    for gradient, want in zip(computed, gradients(expected, index), strict=True):
        torch.testing.assert_close(gradient, want)
    for gradient in (computed[0], computed[2]):
        assert not gradient[0, 3].any()
        assert not gradient[1, 5].any()
    nothing = distillation_loss(index, [target], layout, torch.full_like(selected, -1))
    assert nothing.item() == 0
    assert all(not g.any() for g in gradients(nothing, index))


@pytest.mark.parametrize("topk", [None, K, FEW], ids=["warmup", "masked", "gathered"])
def test_autocast_changes_no_bit(topk: int | None) -> None:
    index, target, layout = random_index(torch.float32), random_attention(torch.float32), packed()

    def run() -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        selected = select_top_k(index, layout, topk, 5) if topk else None
        loss = distillation_loss(index, [target], layout, selected, block=5)
        return selected, [loss, *gradients(loss, index)]

    plain_selection, plain = run()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        selection, cast = run()
    if topk:
        assert torch.equal(selection, plain_selection)  # type: ignore[arg-type]
    for a, b in zip(plain, cast, strict=True):
        assert a.dtype == b.dtype == torch.float32
        assert torch.equal(a, b)


def test_nothing_but_the_indexer_gets_a_gradient() -> None:
    index, layout = random_index(), packed()
    queries, keys = (torch.randn(B, N, T, W, requires_grad=True) for _ in range(2))
    distillation_loss(index, [AttentionInputs(queries, keys, 1.0)], layout).backward()
    assert index.queries.grad is not None
    assert queries.grad is None
    assert keys.grad is None


@pytest.mark.parametrize("topk", [1, K, T, 2 * T])
def test_the_selection_is_that_of_the_kernels_contract(topk: int) -> None:
    """Whole numbers tie often, and the ReLU makes many scores exactly 0, from either side."""
    index, layout = random_index(torch.float32, grad=False), packed()
    index = IndexInputs(*(tensor.sign() for tensor in vars(index).values()))
    index.keys[:, 3:9] = -index.queries[:, :1, 0]
    selected = select_top_k(index, layout, topk, block=5)
    dots = torch.relu(torch.einsum("bthd,bsd->bths", index.queries, index.keys))
    scores = torch.einsum("bth,bths->bts", index.weights, dots)
    for b in range(B):
        for start, end in document_bounds(layout, b):
            rows = slice(start, end)
            visible = torch.arange(1, end - start + 1)
            expected = reference.topk(scores[b, rows, rows], visible, topk)
            mine = selected[b, rows].where(selected[b, rows] < 0, selected[b, rows] - start)
            mine = mine.long().where(mine >= 0, T).sort(-1).values  # padding last
            mine = torch.nn.functional.pad(mine, (0, topk - mine.shape[1]), value=T)
            assert torch.equal(mine.where(mine < T, -1).int(), expected)


def document_bounds(layout: Layout, row: int) -> list[tuple[int, int]]:
    numbers = layout.documents[row].tolist()
    return [(numbers.index(n), len(numbers) - numbers[::-1].index(n)) for n in set(numbers)]


@pytest.mark.parametrize("scale", [1e4, 1e8])
def test_extreme_scores_stay_finite_in_float32(scale: float) -> None:
    index = random_index(torch.float32)
    huge = IndexInputs(index.queries, index.keys, index.weights * scale)
    target = random_attention(torch.float32)
    sharp = AttentionInputs(target.queries * scale, target.keys, target.scale)
    loss = distillation_loss(huge, [sharp], packed())
    assert torch.isfinite(loss)
    assert loss >= 0
    assert all(torch.isfinite(g).all() for g in gradients(loss, index))


def test_bfloat16_inputs_are_computed_in_float32() -> None:
    index, target, layout = random_index(torch.bfloat16), random_attention(torch.bfloat16), packed()
    loss = distillation_loss(index, [target], layout)
    assert loss.dtype == torch.float32
    wide = IndexInputs(*(x.detach().double() for x in vars(index).values()))
    precise = AttentionInputs(target.queries.double(), target.keys.double(), target.scale)
    expected = distillation_loss(wide, [precise], layout)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-4, atol=1e-4)


def test_no_gradient_is_computed_when_none_is_wanted() -> None:
    index = random_index(grad=False)
    assert not distillation_loss(index, [random_attention()], packed()).requires_grad


INDEX = {"queries": (B, T, H, D), "keys": (B, T, D), "weights": (B, T, H)}


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("keys", (B, T - 1, D), r"index keys are \[batch, tokens, width\] = \[2, 19, 5\] .* got"),
        ("keys", (B, T, D + 1), r"index keys are .* got \[2, 19, 6\]"),
        ("keys", (B, T, H, D), r"index keys are .* got \[2, 19, 3, 5\]"),
        ("weights", (B, T, H, 1), r"index weights are .* one entry, so give it \.squeeze\(-1\)"),
        ("weights", (B, T, H + 1), r"index weights are .* = \[2, 19, 3\] .* got \[2, 19, 4\]"),
        ("weights", (B, H, T), r"index weights are .* got \[2, 3, 19\]"),
        ("queries", (B, T - 1, H, D), r"index queries are .* got \[2, 18, 3, 5\]"),
        (
            "queries",
            (T, H, D),
            r"index queries are .* = \[2, 19, \?, \?\] .* packed row is a batch",
        ),
    ],
)
def test_index_inputs_of_other_shapes(name: str, shape: tuple[int, ...], message: str) -> None:
    """DeepSeek's own code has weights with a last dimension of 1; torch once spoke for us."""
    index = IndexInputs(**{n: torch.randn(s) for n, s in {**INDEX, name: shape}.items()})
    for selected in (None, select_top_k(random_index(), packed(), FEW)):
        with pytest.raises(TrainingError, match=message):
            distillation_loss(index, [random_attention()], packed(), selected)


@pytest.mark.parametrize(
    ("queries", "keys", "message"),
    [
        ((B, T, N, W), (B, N, T, W), "key heads do not divide 19 heads"),
        ((B, N, T, W), (B, 3, T, W), "3 key heads do not divide 4 heads"),
        ((B, N, T, W), (B, N, T, W + 1), r"attention queries are .* got \[2, 4, 19, 6\]"),
        ((B, N, T, W), (B, N, T - 1, W), r"attention keys are .* got \[2, 4, 18, 6\]"),
        ((N, T, W), (N, T, W), r"attention queries are .* packed row is a batch of one"),
    ],
)
def test_attention_of_other_shapes(
    queries: tuple[int, ...], keys: tuple[int, ...], message: str
) -> None:
    target = AttentionInputs(torch.randn(queries), torch.randn(keys), 1.0)
    with pytest.raises(TrainingError, match=message):
        distillation_loss(random_index(), [random_attention(), target], packed())


def test_a_loss_without_a_target() -> None:
    with pytest.raises(TrainingError, match="at least one served layer"):
        distillation_loss(random_index(), [], packed())


@pytest.mark.parametrize("topk", [K, FEW], ids=["masked", "gathered"])
@pytest.mark.parametrize("block", [1, 7, 100])
def test_selections_that_break_their_contract(topk: int, block: int) -> None:
    """A place that came twice once gave a loss of 0, and one behind the end torch's words."""
    index, target, layout = random_index(), random_attention(), packed()
    right = select_top_k(index, layout, topk)
    twice, behind = right.clone(), right.clone()
    twice[1, T - 1, :2] = 3
    behind[0, 2, 0] = T
    for selected, message in (
        (twice, "the same place twice for one query"),
        (behind, rf"holds the place {T}, and a row has {T} tokens.*SGLANG_DSA_FUSE_TOPK=0"),
        (right[:, 1:], r"selected are integers \[batch, tokens, k\] = \[2, 19, \?\]"),
        (right[0], r"selected are integers .* got torch.int32"),
        (right.float(), r"selected are integers .* got torch.float32"),
    ):
        with pytest.raises(TrainingError, match=message):
            distillation_loss(index, [target], layout, selected, block)
        with pytest.raises(TrainingError, match=message):
            captured_mass(target, layout, selected, block)


def test_padding_may_come_often_and_a_hidden_place_is_left_out() -> None:
    index, target, layout = random_index(), random_attention(), packed()
    selected = torch.full((B, T, K), -1)
    selected[..., 0] = torch.arange(T)  # each itself
    selected[0, 3, 1] = 12  # of another document, and later
    loss = distillation_loss(index, [target], layout, selected)
    torch.testing.assert_close(loss, dense_oracle(index, [target], layout, selected))
    nothing = torch.empty(B, T, 0, dtype=torch.int32)
    assert distillation_loss(index, [target], layout, nothing) == 0
