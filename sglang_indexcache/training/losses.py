"""The distillation losses of DSA and of training-aware IndexCache.

Paper section "Training-Aware IndexCache": L_multi is the mean over the served layers of
KL(p^(l+j) || q^(l)), L_avg is KL(mean of p || q^(l)); Proposition 1 says that their gradients are
equal. Both are sums over queries here, as in the paper; divide by the number of queries for a
mean. The warm-up form sums over every visible key, the sparse form over the selected ones only.

Nothing of size L x L is ever held: a block of queries is scored, its loss and the gradient of
that loss are added up, and the block's scores are dropped. Peak memory is
O(block x L x heads), the same for any number of blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import relu

from sglang_indexcache.errors import TrainingError
from sglang_indexcache.training.packing import Layout, selected_mask

DEFAULT_BLOCK = 256


@dataclass(frozen=True)
class IndexInputs:
    """What an indexer scores with.

    The score of key s for query t is ``sum_h weights[t, h] * relu(queries[t, h] . keys[s])``.

    Attributes:
        queries: ``[B, T, H, D]``, rotated.
        keys: ``[B, T, D]``, rotated.
        weights: ``[B, T, H]`` with every scale folded in.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    weights: torch.Tensor

    def block(self, rows: slice) -> IndexInputs:
        """The same with only some of the queries."""
        return IndexInputs(self.queries[:, rows], self.keys, self.weights[:, rows])

    def scores(self) -> torch.Tensor:
        """``[B, queries, keys]`` index scores in at least float32, not masked."""
        queries = _at_least_float32(self.queries).transpose(1, 2)
        keys = _at_least_float32(self.keys).unsqueeze(1).transpose(-1, -2)
        weights = _at_least_float32(self.weights).unsqueeze(2)
        return (weights @ relu(queries @ keys).transpose(1, 2)).squeeze(2)


@dataclass(frozen=True)
class AttentionInputs:
    """The main attention of a served layer, as far as its probabilities go.

    Attributes:
        queries: ``[B, N, T, d]``.
        keys: ``[B, N, T, d]``, or ``[B, 1, T, d]`` for one key head.
        scale: multiplies the dot products.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    scale: float

    @torch.no_grad()
    def distribution(self, rows: slice, support: torch.Tensor) -> torch.Tensor:
        """The target p: attention over ``support``, averaged over the heads; ``[B, rows, T]``."""
        queries = _at_least_float32(self.queries[:, :, rows])
        keys = _at_least_float32(self.keys)
        scores = (queries * self.scale) @ keys.transpose(-1, -2)
        return scores.masked_fill(~support.unsqueeze(1), float("-inf")).softmax(-1).mean(1)


@torch.no_grad()
def select_top_k(
    index: IndexInputs, layout: Layout, topk: int, block: int = DEFAULT_BLOCK
) -> torch.Tensor:
    """The ``topk`` visible keys with the highest scores, as the kernels' contract selects them.

    Keys of equal score are taken from the smaller position on. They are common: a key that every
    head scores negative has score 0.

    Args:
        index: of one layer.
        layout: who sees whom.
        topk: keys per query; all visible ones where there are fewer.
        block: queries scored at a time.

    Returns:
        ``[B, T, min(topk, T)]`` int32, highest score first, -1 in the places that stay empty.
    """
    found = []
    for rows in layout.blocks(block):
        scores = index.block(rows).scores().masked_fill_(~layout.visible(rows), float("-inf"))
        # torch.topk breaks ties as it likes. Adding +0.0 makes -0.0 equal to it on every device.
        ordered = scores.add_(0.0).sort(dim=-1, descending=True, stable=True)
        best, places = (part[..., :topk] for part in ordered)
        found.append(places.masked_fill(best == float("-inf"), -1).int())
    return torch.cat(found, dim=1)


def distillation_loss(
    index: IndexInputs,
    targets: Sequence[AttentionInputs],
    layout: Layout,
    selected: torch.Tensor | None = None,
    block: int = DEFAULT_BLOCK,
) -> torch.Tensor:
    """Sum over queries of KL(mean of the targets' p || q): L_avg, or one term of L_multi.

    Args:
        index: of the F layer; the only thing that receives a gradient.
        targets: one served layer for a term of L_multi (or plain DSA), several for L_avg.
        layout: who sees whom.
        selected: ``[B, T, k]`` top-k indices padded with -1, for the sparse form; None for the
            warm-up form.
        block: queries per block.

    Returns:
        A scalar. Divide by ``layout.counted.sum()`` for the mean over queries.

    Raises:
        TrainingError: shapes that do not fit together, or no target.
    """
    _check(index, targets, layout, selected)
    job = _Job(tuple(targets), layout, selected, block)
    loss: torch.Tensor = _Blockwise.apply(index.queries, index.keys, index.weights, job)
    return loss


def multi_layer_loss(
    index: IndexInputs,
    targets: Sequence[AttentionInputs],
    layout: Layout,
    selected: torch.Tensor | None = None,
    block: int = DEFAULT_BLOCK,
) -> torch.Tensor:
    """L_multi: the mean over the served layers of each layer's own KL (paper, multi-distill).

    The arguments are those of :func:`distillation_loss`. A trainer need not call it: a served
    layer can add its own term, divided by the group's size, with q alone handed down.
    """
    terms = [distillation_loss(index, [target], layout, selected, block) for target in targets]
    return torch.stack(terms).mean()


def kl_divergence(p: torch.Tensor, scores: torch.Tensor, support: torch.Tensor) -> torch.Tensor:
    """KL(p || softmax(scores)) over ``support``, per query.

    Safe where p or q underflows to 0 and where scores are large: log q comes from a shifted
    log-sum-exp, 0 log 0 is 0, and keys outside the support contribute neither value nor gradient.

    Args:
        p: ``[..., S]``, zero outside the support.
        scores: ``[..., S]``.
        support: ``[..., S]`` bool, at least one key per query.

    Returns:
        ``[...]`` nats.
    """
    log_q = scores.masked_fill(~support, float("-inf")).log_softmax(-1)
    # -inf times a p of 0 would be NaN, in the value and in the gradient.
    cross = p * log_q.masked_fill(~support, 0.0)
    return (torch.xlogy(p, p) - cross).sum(-1)


@dataclass(frozen=True)
class _Job:
    """The arguments of a loss that get no gradient."""

    targets: tuple[AttentionInputs, ...]
    layout: Layout
    selected: torch.Tensor | None
    block: int

    def loss(self, index: IndexInputs, rows: slice) -> torch.Tensor:
        """The loss of the queries ``rows``, which ``index`` is cut to."""
        support = self.layout.visible(rows)
        if self.selected is not None:
            support = support & selected_mask(self.selected[:, rows], self.layout.length)
        targets = [target.distribution(rows, support) for target in self.targets]
        p = torch.stack(targets).mean(0) if len(targets) > 1 else targets[0]
        divergence = kl_divergence(p, index.scores(), support)
        return (divergence * self.layout.counted[:, rows]).sum()


class _Blockwise(torch.autograd.Function):
    """Adds up the loss over blocks, and its gradient with it.

    The loss is a scalar, so its gradient is known up to a factor while the block's scores are
    still at hand. Taking it in the forward pass costs no second computation of p.
    """

    @staticmethod
    def forward(
        ctx: Any, queries: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor, job: _Job
    ) -> torch.Tensor:
        index = IndexInputs(queries, keys, weights)
        wanted = any(ctx.needs_input_grad)
        gradient = _zeros_like(index) if wanted else None
        total = torch.zeros((), dtype=_accumulator(keys.dtype), device=keys.device)
        for rows in job.layout.blocks(job.block):
            total += _block(index.block(rows), job, rows, gradient)
        if gradient is not None:
            ctx.save_for_backward(gradient.queries, gradient.keys, gradient.weights)
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients = (g * upstream[0].to(g.dtype) for g in ctx.saved_tensors)
        return (*gradients, None)


def _block(
    index: IndexInputs, job: _Job, rows: slice, gradient: IndexInputs | None
) -> torch.Tensor:
    """One block's loss; its gradient goes into ``gradient`` if that is wanted."""
    if gradient is None:
        return job.loss(index, rows)
    leaves = [x.detach().requires_grad_() for x in (index.queries, index.keys, index.weights)]
    with torch.enable_grad():
        loss = job.loss(IndexInputs(*leaves), rows)
        queries, keys, weights = torch.autograd.grad(loss, leaves)
    gradient.queries[:, rows] = queries
    gradient.keys.add_(keys)
    gradient.weights[:, rows] = weights
    return loss.detach()


def _zeros_like(index: IndexInputs) -> IndexInputs:
    return IndexInputs(*(torch.zeros_like(x) for x in (index.queries, index.keys, index.weights)))


def _check(
    index: IndexInputs,
    targets: Sequence[AttentionInputs],
    layout: Layout,
    selected: torch.Tensor | None,
) -> None:
    batch, length = layout.documents.shape
    if not targets:
        raise TrainingError("distillation needs at least one served layer's attention")
    shapes = {
        "index queries": index.queries.shape[:2],
        "index keys": index.keys.shape[:2],
        "index weights": index.weights.shape[:2],
    }
    for target in targets:
        shapes["attention queries"] = target.queries.shape[0::2]
        shapes["attention keys"] = target.keys.shape[0::2]
        _check_shapes(shapes, (batch, length))
    if selected is not None:
        _check_shapes({"selected": selected.shape[:2]}, (batch, length))


def _check_shapes(shapes: dict[str, torch.Size], wanted: tuple[int, int]) -> None:
    for name, shape in shapes.items():
        if tuple(shape) != wanted:
            raise TrainingError(
                f"{name} are for [batch, tokens] = {list(shape)}, the layout is for {list(wanted)}"
            )


def _at_least_float32(x: torch.Tensor) -> torch.Tensor:
    return x.to(_accumulator(x.dtype))


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
