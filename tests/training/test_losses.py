"""The losses against a naive float64 computation that shares no code with them."""

from __future__ import annotations

import math

import pytest
import torch

from sglang_indexcache.errors import TrainingError
from sglang_indexcache.kernels.topk import reference
from sglang_indexcache.training.losses import (
    AttentionInputs,
    IndexInputs,
    distillation_loss,
    kl_divergence,
    multi_layer_loss,
    select_top_k,
)
from sglang_indexcache.training.packing import Layout

B, T, H, D, N, W, K = 2, 19, 3, 5, 4, 6, 4


def random_index(dtype: torch.dtype = torch.float64, grad: bool = True) -> IndexInputs:
    shapes = ((B, T, H, D), (B, T, D), (B, T, H))
    return IndexInputs(*(torch.randn(s, dtype=dtype).requires_grad_(grad) for s in shapes))


def random_attention(dtype: torch.dtype = torch.float64) -> AttentionInputs:
    queries, keys = (torch.randn(B, N, T, W, dtype=dtype) for _ in range(2))
    return AttentionInputs(queries, keys, W**-0.5)


def packed() -> Layout:
    """Two documents and padding in one row, one document in the other."""
    documents = torch.zeros(B, T, dtype=torch.int64)
    documents[0, 7:] = 1
    documents[0, 15:] = -1
    return Layout(documents)


def naive_rows(
    index: IndexInputs, target: AttentionInputs, layout: Layout, selected: torch.Tensor | None
) -> dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]:
    """p and q of every counted query, key by key, over the keys it may use."""
    found = {}
    for b in range(B):
        for t in range(T):
            document = layout.documents[b, t]
            if document == -1:
                continue
            keys = [s for s in range(t + 1) if layout.documents[b, s] == document]
            if selected is not None:
                keys = [s for s in keys if s in selected[b, t].tolist()]
            scores = torch.stack(
                [
                    sum(
                        index.weights[b, t, h]
                        * torch.clamp(index.queries[b, t, h] @ index.keys[b, s], min=0)
                        for h in range(H)
                    )
                    for s in keys
                ]
            )
            heads = [
                torch.stack(
                    [target.queries[b, n, t] @ target.keys[b, n, s] * target.scale for s in keys]
                ).softmax(0)
                for n in range(N)
            ]
            found[b, t] = (torch.stack(heads).mean(0), scores.softmax(0))
    return found


def naive_kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (p * (p.log() - q.log())).sum()


def naive_multi(
    index: IndexInputs,
    targets: list[AttentionInputs],
    layout: Layout,
    selected: torch.Tensor | None,
) -> torch.Tensor:
    losses = [
        sum(naive_kl(p, q) for p, q in naive_rows(index, target, layout, selected).values())
        for target in targets
    ]
    return torch.stack(losses).mean()


def naive_avg(
    index: IndexInputs,
    targets: list[AttentionInputs],
    layout: Layout,
    selected: torch.Tensor | None,
) -> torch.Tensor:
    rows = [naive_rows(index, target, layout, selected) for target in targets]
    total = torch.zeros((), dtype=torch.float64)
    for place in rows[0]:
        p = torch.stack([row[place][0] for row in rows]).mean(0)
        total = total + naive_kl(p, rows[0][place][1])
    return total


def gradients(loss: torch.Tensor, index: IndexInputs) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, [index.queries, index.keys, index.weights]))


@pytest.mark.parametrize("sparse", [False, True], ids=["warmup", "sparse"])
@pytest.mark.parametrize("block", [1, 4, 7, 100])
def test_multi_equals_the_naive_form(sparse: bool, block: int) -> None:
    index, targets, layout = random_index(), [random_attention() for _ in range(3)], packed()
    selected = select_top_k(index, layout, K, block) if sparse else None
    loss = multi_layer_loss(index, targets, layout, selected, block)
    expected = naive_multi(index, targets, layout, selected)
    torch.testing.assert_close(loss, expected)
    for got, want in zip(gradients(loss, index), gradients(expected, index), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("sparse", [False, True], ids=["warmup", "sparse"])
def test_avg_equals_the_naive_form(sparse: bool) -> None:
    index, targets, layout = random_index(), [random_attention() for _ in range(3)], packed()
    selected = select_top_k(index, layout, K, 5) if sparse else None
    loss = distillation_loss(index, targets, layout, selected, block=5)
    expected = naive_avg(index, targets, layout, selected)
    torch.testing.assert_close(loss, expected)
    for got, want in zip(gradients(loss, index), gradients(expected, index), strict=True):
        torch.testing.assert_close(got, want)


def test_gradcheck() -> None:
    index, target, layout = random_index(), random_attention(), packed()

    def loss(queries: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return distillation_loss(IndexInputs(queries, keys, weights), [target], layout, block=4)

    assert torch.autograd.gradcheck(loss, (index.queries, index.keys, index.weights))


def test_gradcheck_of_the_sparse_form_with_a_fixed_selection() -> None:
    index, target, layout = random_index(), random_attention(), packed()
    selected = select_top_k(index, layout, K, 5)

    def loss(queries: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        given = IndexInputs(queries, keys, weights)
        return distillation_loss(given, [target], layout, selected, block=4)

    assert torch.autograd.gradcheck(loss, (index.queries, index.keys, index.weights))


def test_an_upstream_factor_scales_the_gradient() -> None:
    index, target, layout = random_index(), random_attention(), packed()
    once = gradients(distillation_loss(index, [target], layout), index)
    thrice = gradients(3 * distillation_loss(index, [target], layout), index)
    for a, b in zip(once, thrice, strict=True):
        torch.testing.assert_close(3 * a, b)


def test_nothing_but_the_indexer_gets_a_gradient() -> None:
    index, layout = random_index(), packed()
    queries, keys = (torch.randn(B, N, T, W, requires_grad=True) for _ in range(2))
    distillation_loss(index, [AttentionInputs(queries, keys, 1.0)], layout).backward()
    assert index.queries.grad is not None
    assert queries.grad is None
    assert keys.grad is None


def test_a_query_that_sees_only_itself_costs_nothing_and_pulls_nowhere() -> None:
    index, target = random_index(), random_attention()
    alone = Layout(torch.arange(T).expand(B, T).contiguous())  # every token its own document
    loss = distillation_loss(index, [target], alone)
    assert loss.item() == 0
    assert all(not g.any() for g in gradients(loss, index))


@pytest.mark.parametrize("topk", [1, K, T, 2 * T])
def test_the_selection_is_that_of_the_kernels_contract(topk: int) -> None:
    """Whole numbers tie often, and the ReLU makes many scores exactly 0, from either side."""
    index, layout = random_index(torch.float32, grad=False), packed()
    index = IndexInputs(*(tensor.sign() for tensor in vars(index).values()))
    index.keys[:, 3:9] = -index.queries[:, :1, 0]
    selected = select_top_k(index, layout, topk, block=5)
    scores = index.scores()
    for b in range(B):
        for start, end in document_bounds(layout, b):
            rows = slice(start, end)
            visible = torch.arange(1, end - start + 1)
            expected = reference.topk(scores[b, rows, rows], visible, topk)
            got = selected[b, rows].where(selected[b, rows] < 0, selected[b, rows] - start)
            got = got.long().where(got >= 0, T).sort(-1).values  # padding last
            got = torch.nn.functional.pad(got, (0, topk - got.shape[1]), value=T)
            assert torch.equal(got.where(got < T, -1).int(), expected)


def document_bounds(layout: Layout, row: int) -> list[tuple[int, int]]:
    numbers = layout.documents[row].tolist()
    return [(numbers.index(n), len(numbers) - numbers[::-1].index(n)) for n in set(numbers)]


def test_keys_that_no_head_likes_are_taken_from_the_first_on() -> None:
    ones = torch.ones(1, 64, 2, 8)
    index = IndexInputs(ones, -ones[:, :, 0], ones[..., 0])  # every score is relu(-8) = 0
    layout = Layout(torch.zeros(1, 64, dtype=torch.int64))
    assert select_top_k(index, layout, 3)[0, 2:].tolist() == [[0, 1, 2]] * 62


def test_fewer_than_k_keys_are_all_selected() -> None:
    index, target, layout = random_index(), random_attention(), packed()
    every = select_top_k(index, layout, T, 5)
    sparse = distillation_loss(index, [target], layout, every, block=5)
    torch.testing.assert_close(sparse, distillation_loss(index, [target], layout, block=5))
    first = select_top_k(index, layout, K, 5)[:, :K]
    for t in range(K):
        assert sorted(s for s in first[1, t].tolist() if s >= 0) == list(range(t + 1))


def test_documents_and_padding_do_not_leak() -> None:
    """A packed row's loss is the sum of its documents' losses, whatever the padding holds."""
    index, target, layout = random_index(grad=False), random_attention(), packed()

    def part(row: int, start: int, end: int) -> torch.Tensor:
        cut = (slice(row, row + 1), slice(start, end))
        own = IndexInputs(index.queries[cut], index.keys[cut], index.weights[cut])
        heads = (cut[0], slice(None), cut[1])
        attention = AttentionInputs(target.queries[heads], target.keys[heads], target.scale)
        alone = Layout(torch.zeros(1, end - start, dtype=torch.int64))
        return distillation_loss(own, [attention], alone)

    expected = part(0, 0, 7) + part(0, 7, 15) + part(1, 0, T)
    torch.testing.assert_close(distillation_loss(index, [target], layout, block=4), expected)
    index.keys[0, 15:] = 1e6
    target.keys[0, :, 15:] = -1e6
    torch.testing.assert_close(distillation_loss(index, [target], layout, block=4), expected)


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


def test_kl_of_equal_distributions_is_zero_and_of_disjoint_ones_is_large() -> None:
    scores = torch.randn(3, 8, dtype=torch.float64)
    everything = torch.ones(3, 8, dtype=torch.bool)
    same = kl_divergence(scores.softmax(-1), scores, everything)
    torch.testing.assert_close(same, torch.zeros(3, dtype=torch.float64), atol=1e-14, rtol=0)
    p = torch.tensor([0.0, 1.0], dtype=torch.float64)
    q_scores = torch.tensor([1000.0, 0.0], dtype=torch.float64)
    assert kl_divergence(p, q_scores, torch.ones(2, dtype=torch.bool)).item() == 1000.0


def test_kl_by_hand() -> None:
    p = torch.tensor([0.5, 0.25, 0.25, 0.0], dtype=torch.float64)
    support = torch.tensor([True, True, True, False])
    uniform = torch.zeros(4, dtype=torch.float64)
    expected = math.log(3) - 1.5 * math.log(2)  # log n minus the entropy of p
    assert kl_divergence(p, uniform, support).item() == pytest.approx(expected, abs=1e-15)


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


def test_wrong_shapes_are_one_clear_error() -> None:
    index, target, layout = random_index(), random_attention(), packed()
    short = IndexInputs(index.queries, index.keys[:, 1:], index.weights)
    with pytest.raises(TrainingError, match="index keys are for"):
        distillation_loss(short, [target], layout)
    with pytest.raises(TrainingError, match="selected are for"):
        distillation_loss(index, [target], layout, torch.zeros(B, T - 1, 2, dtype=torch.int32))
    with pytest.raises(TrainingError, match="at least one served layer"):
        distillation_loss(index, [], layout)
