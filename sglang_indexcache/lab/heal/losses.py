"""The distillation losses of DSA and of training-aware IndexCache.

Paper section "Training-Aware IndexCache": L_multi is the mean over the served layers of
KL(p^(l+j) || q^(l)), L_avg is KL(mean of p || q^(l)); Proposition 1 says that their gradients are
equal. Both are sums over queries here, as in the paper; divide by the number of queries for a
mean. The warm-up form sums over every visible key, the sparse form only over the selected keys. The
sparse form gathers the k keys of each query and scores no others, unless k is so close to L that
scoring all keys in one product is cheaper.

Nothing of size L x L is ever held: a block of queries is scored, its loss and gradient are added
up, and the block's scores are dropped. Peak memory besides the inputs is O(block x L x heads), or
O(block x k x (heads + width)) if keys are gathered.

Everything is computed in float32 (float64 inputs in float64), whatever autocast says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad, relu

from sglang_indexcache.errors import TrainingError
from sglang_indexcache.lab.heal.packing import Layout

DEFAULT_BLOCK = 256

GATHERED_FROM = 16
"""Selected keys are gathered if there are at least this many tokens per selected key. Measured on a
CPU (``benchmarks/results/distillation_loss.json``): gathering takes 1/1.3 of the time of scoring
and masking all keys at 16 times, and 3.4 times as long at 8. Not measured on a GPU. """


@dataclass(frozen=True)
class IndexInputs:
    """Inputs of an indexer's scores.

    The score of key s for query t is ``sum_h weights[t, h] * relu(queries[t, h] . keys[s])``.
    Q is T, or the number of queries in the layout.

    Attributes:
        queries: ``[B, Q, H, D]``, rotated.
        keys: ``[B, T, D]``, rotated.
        weights: ``[B, Q, H]`` with every scale folded in.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True)
class AttentionInputs:
    """Inputs of a served layer's main attention that determine its probabilities.

    Attributes:
        queries: ``[B, N, Q, d]``; Q as in :class:`IndexInputs`.
        keys: ``[B, N, T, d]``, or fewer key heads that divide N (one: ``[B, 1, T, d]``).
        scale: factor of the dot products.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    scale: float

    def by_key_head(self, rows: slice) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each key head's scaled queries ``[B, rows, heads, d]`` and keys ``[B, T, d]``."""
        for queries, keys in zip(
            self.queries[:, :, rows].chunk(self.keys.shape[1], dim=1),
            self.keys.unbind(1),
            strict=True,
        ):
            yield _at_least_float32(queries.transpose(1, 2)) * self.scale, keys


@torch.no_grad()
def select_top_k(
    index: IndexInputs, layout: Layout, topk: int, block: int = DEFAULT_BLOCK
) -> torch.Tensor:
    """Select the ``topk`` visible keys with the highest scores, as in the kernels' contract.

    Among keys with equal scores, smaller positions are selected first. Equal scores are common: a
    key that every head scores negative has score 0.

    Returns:
        ``[B, Q, min(topk, T)]`` int32, highest score first, padded with -1.
    """
    width = min(topk, layout.length)
    blocks = []
    with _full_precision(index.keys.device):
        for rows in layout.blocks(block):
            scores = _VisibleKeys(layout, rows, None).scores(index)[0]
            # Adding +0.0 turns -0.0 into +0.0 on every device.
            best, places = _first_best(scores.add_(0.0), min(width, scores.shape[-1]))
            places = places.masked_fill(best == float("-inf"), -1).int()
            blocks.append(pad(places, (0, width - places.shape[-1]), value=-1))
    return torch.cat(blocks[::-1], dim=1)


def _first_best(scores: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ``width`` highest of ``[..., S]`` and their places; of equal values the first.

    torch.topk breaks ties arbitrarily, and a stable sort of all of S takes many times as long. So
    only rows are sorted whose lowest selected score equals a score that is left out.
    """
    best, places = scores.topk(width, dim=-1)
    border = best[..., -1:]
    alike = (scores == border).sum(-1) > (best == border).sum(-1)
    crowded = alike & (border.squeeze(-1) > float("-inf"))
    if crowded.any():
        sorted_best, sorted_places = scores[crowded].sort(dim=-1, descending=True, stable=True)
        best[crowded], places[crowded] = sorted_best[..., :width], sorted_places[..., :width]
    places = places.sort(dim=-1).values
    best, order = scores.gather(-1, places).sort(dim=-1, descending=True, stable=True)
    return best, places.gather(-1, order)


def distillation_loss(
    index: IndexInputs,
    targets: Sequence[AttentionInputs],
    layout: Layout,
    selected: torch.Tensor | None = None,
    block: int = DEFAULT_BLOCK,
    average: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Sum over queries of KL(mean of the targets' p || q): L_avg, or one term of L_multi.

    A query that selected nothing, or nothing that it may see, has no loss and no gradient.

    Args:
        index: index inputs of the F layer, the only ones that receive a gradient.
        targets: one served layer for a term of L_multi (or plain DSA), several for L_avg.
        selected: ``[B, Q, k]`` top-k indices padded with -1, each at most once in a row, for the
            sparse form; None for the warm-up form.
        average: turns this process's p ``[B, rows, S]`` into the mean over all processes, if tensor
            parallelism splits the heads; every process calls it equally often. None if this process
            has all heads.

    Returns:
        A scalar. Divide by ``layout.counted.sum()`` for the mean over queries.

    Raises:
        TrainingError: shapes do not fit together, a selection breaks its contract, or there is no
            target.
    """
    _check(index, targets, layout, selected, block)
    job = _Job(tuple(targets), layout, selected, block, average)
    loss: torch.Tensor = _Blockwise.apply(index.queries, index.keys, index.weights, job)
    return loss


def multi_layer_loss(
    index: IndexInputs,
    targets: Sequence[AttentionInputs],
    layout: Layout,
    selected: torch.Tensor | None = None,
    block: int = DEFAULT_BLOCK,
) -> torch.Tensor:
    """Compute L_multi, the mean of the served layers' own KL (paper, multi-distill).

    The arguments are those of :func:`distillation_loss`. A trainer need not call this function: a
    served layer can add its own term, divided by the group's size, if only q is passed down.
    """
    terms = [distillation_loss(index, [target], layout, selected, block) for target in targets]
    return torch.stack(terms).mean()


@torch.no_grad()
def captured_mass(
    target: AttentionInputs, layout: Layout, selected: torch.Tensor, block: int = DEFAULT_BLOCK
) -> tuple[torch.Tensor, torch.Tensor]:
    """Measure the share of a layer's attention to all visible keys that goes to selected keys.

    Only queries that see more keys than they may select are counted; all others select everything.

    Args:
        selected: ``[B, Q, k]`` top-k indices padded with -1.

    Returns:
        Two scalars: the attention mass, as a mean over heads summed over these queries, and their
        number.

    Raises:
        TrainingError: the selection breaks its contract.
    """
    _check_selected(layout, selected, block)
    mass = torch.zeros((), dtype=_accumulator(target.keys.dtype), device=target.keys.device)
    queries = torch.zeros((), dtype=torch.int64, device=target.keys.device)
    with _full_precision(target.keys.device):
        for rows in layout.blocks(block):
            keys = _VisibleKeys(layout, rows, None)
            is_attended = layout.attended(rows, selected)
            choosing = layout.counted[:, rows] & (keys.allowed.sum(-1) > selected.shape[-1])
            captured = keys.distribution(target).masked_fill_(~is_attended, 0.0).sum(-1)
            mass += (captured * choosing).sum()
            queries += choosing.sum()
    return mass, queries


def _log_softmax(scores: torch.Tensor, support: torch.Tensor) -> torch.Tensor:
    """Return the log of q over the support, -inf outside; it is never NaN, even without support."""
    empty = ~support.any(-1, keepdim=True)
    inside = scores.masked_fill(~support, float("-inf")).masked_fill(empty, 0.0)
    return inside.log_softmax(-1).masked_fill(~support, float("-inf"))


def _divergence(p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """Return KL(p || q) per query in nats; keys outside the support add nothing, 0 log 0 is 0."""
    # -inf times p = 0 would be NaN, in the value and in the gradient.
    return (torch.xlogy(p, p) - p * log_q.masked_fill(p == 0, 0.0)).sum(-1)


class _VisibleKeys:
    """All keys that a block of queries sees, perhaps masked to the selected keys.

    Keys after the block's last query are not scored.

    Attributes:
        allowed: ``[B, rows, S]`` bool that marks the keys each query may use.
    """

    def __init__(self, layout: Layout, rows: slice, selected: torch.Tensor | None) -> None:
        self.rows, self.reach = rows, layout.reach(rows)
        self.allowed = layout.attended(rows, selected)

    def take(self, keys: torch.Tensor) -> torch.Tensor:
        """Return the block's keys from ``[B, T, D]`` keys, in at least float32."""
        return _at_least_float32(keys[:, : self.reach])

    def dots(self, queries: torch.Tensor, gathered: torch.Tensor) -> torch.Tensor:
        """Return ``[B, rows, heads, S]`` dot products of queries ``[B, rows, heads, D]``."""
        flat = queries.flatten(1, 2) @ gathered.transpose(-1, -2)
        return flat.view(*queries.shape[:3], -1)

    def to_queries(self, pull: torch.Tensor, gathered: torch.Tensor) -> torch.Tensor:
        """Return the queries' gradient ``[B, rows, heads, D]`` from the dots' gradient ``pull``."""
        return (pull.flatten(1, 2) @ gathered).view(*pull.shape[:3], -1)

    def to_keys(self, pull: torch.Tensor, queries: torch.Tensor, total: torch.Tensor) -> None:
        """Add the keys' gradient to ``total`` ``[B, T, D]``, from the dot products' gradient."""
        gradient = pull.flatten(1, 2).transpose(-1, -2) @ queries.flatten(1, 2)
        total[:, : self.reach] += gradient

    def scores(self, index: IndexInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the index scores of the block.

        Returns:
            The scores ``[B, rows, S]``, -inf where a key is not allowed; the heads' unweighted
            results ``[B, rows, heads, S]``; and the keys, as from :meth:`take`.
        """
        gathered = self.take(index.keys)
        hits = relu(self.dots(_at_least_float32(index.queries[:, self.rows]), gathered))
        weights = _at_least_float32(index.weights[:, self.rows]).unsqueeze(2)
        scores = (weights @ hits).squeeze(2)
        return scores.masked_fill_(~self.allowed, float("-inf")), hits, gathered

    def distribution(self, target: AttentionInputs) -> torch.Tensor:
        """Return p ``[B, rows, S]``, the attention over the allowed keys, as a mean over heads.

        Rows without allowed keys are zero. Key heads are processed one at a time, so that memory
        does not grow with their number.
        """
        hidden = ~self.allowed
        p = torch.zeros((), dtype=_accumulator(target.keys.dtype), device=hidden.device)
        for queries, keys in target.by_key_head(self.rows):
            scores = self.dots(queries, self.take(keys))
            p = p + scores.masked_fill_(hidden.unsqueeze(2), float("-inf")).softmax(-1).sum(2)
        return (p / target.queries.shape[1]).masked_fill(hidden, 0.0)


class _SelectedKeys(_VisibleKeys):
    """The gathered keys that each query selected; padding and invisible keys are not allowed."""

    def __init__(self, layout: Layout, rows: slice, selected: torch.Tensor) -> None:
        selection = selected[:, rows].long()
        self.rows, self.places = rows, selection.clamp_min(0)
        self.allowed = layout.sees(rows, self.places) & (selection >= 0)

    def take(self, keys: torch.Tensor) -> torch.Tensor:
        # One index_select per row of the batch copies whole keys; keys[batch, places] takes twice
        # as long on a CPU.
        rows = [row.index_select(0, p.flatten()) for row, p in zip(keys, self.places, strict=True)]
        return _at_least_float32(torch.stack(rows)).view(*self.places.shape, keys.shape[-1])

    def dots(self, queries: torch.Tensor, gathered: torch.Tensor) -> torch.Tensor:
        return queries @ gathered.transpose(-1, -2)

    def to_queries(self, pull: torch.Tensor, gathered: torch.Tensor) -> torch.Tensor:
        return pull @ gathered

    def to_keys(self, pull: torch.Tensor, queries: torch.Tensor, total: torch.Tensor) -> None:
        gradient = pull.transpose(-1, -2) @ queries
        for row, places in enumerate(self.places):
            total[row].index_add_(0, places.flatten(), gradient[row].flatten(0, 1))


@dataclass(frozen=True)
class _Job:
    """Arguments of a loss that get no gradient."""

    targets: tuple[AttentionInputs, ...]
    layout: Layout
    selected: torch.Tensor | None
    block: int
    average: Callable[[torch.Tensor], torch.Tensor] | None

    def keys(self, rows: slice) -> _VisibleKeys:
        """Return the keys against which the queries ``rows`` are scored."""
        chosen = self.selected
        if chosen is not None and GATHERED_FROM * chosen.shape[-1] <= self.layout.length:
            return _SelectedKeys(self.layout, rows, chosen)
        return _VisibleKeys(self.layout, rows, chosen)

    def add(self, index: IndexInputs, rows: slice, gradient: IndexInputs | None) -> torch.Tensor:
        """Return the loss of the queries ``rows``, and store its gradient in ``gradient``."""
        keys = self.keys(rows)
        scores, hits, gathered = keys.scores(index)
        p = torch.stack([keys.distribution(target) for target in self.targets]).mean(0)
        p = p if self.average is None else self.average(p)
        log_q = _log_softmax(scores, keys.allowed)
        counted = self.layout.counted[:, rows]
        if gradient is not None:
            pull = (log_q.exp() - p) * counted.unsqueeze(-1)  # gradient for the scores
            gradient.weights[:, rows] = (hits @ pull.unsqueeze(-1)).squeeze(-1)
            weights = _at_least_float32(index.weights[:, rows])
            on_dots = (hits > 0) * weights.unsqueeze(-1) * pull.unsqueeze(2)
            gradient.queries[:, rows] = keys.to_queries(on_dots, gathered)
            queries = _at_least_float32(index.queries[:, rows])
            keys.to_keys(on_dots, queries, gradient.keys)
        return (_divergence(p, log_q) * counted).sum()


class _Blockwise(torch.autograd.Function):
    """Autograd function that adds up the loss over blocks, together with its gradient.

    The loss is a scalar, so its gradient is known up to a factor while the block's scores are still
    in memory: the gradient for a score is q - p. Computing it in the forward pass saves a second
    computation of p.
    """

    @staticmethod
    def forward(
        ctx: Any, queries: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor, job: _Job
    ) -> torch.Tensor:
        index = IndexInputs(queries, keys, weights)
        gradient = _no_gradient(index) if any(ctx.needs_input_grad) else None
        total = torch.zeros((), dtype=_accumulator(keys.dtype), device=keys.device)
        with _full_precision(index.keys.device):
            for rows in job.layout.blocks(job.block):
                total += job.add(index, rows, gradient)
        if gradient is not None:
            ctx.save_for_backward(gradient.queries, gradient.keys, gradient.weights)
            ctx.dtype = keys.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        queries, keys, weights = (g * upstream[0] for g in ctx.saved_tensors)
        return queries, keys.to(ctx.dtype), weights, None


def _no_gradient(index: IndexInputs) -> IndexInputs:
    """Return zeros in at least float32, because a key collects terms from every block."""
    keys = torch.zeros_like(index.keys, dtype=_accumulator(index.keys.dtype))
    return IndexInputs(torch.zeros_like(index.queries), keys, torch.zeros_like(index.weights))


def _full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """Turn autocast off, which would compute products of float32 tensors in bfloat16."""
    return torch.autocast(device.type, enabled=False)


def _check(
    index: IndexInputs,
    targets: Sequence[AttentionInputs],
    layout: Layout,
    selected: torch.Tensor | None,
    block: int,
) -> None:
    if not targets:
        raise TrainingError("distillation needs at least one served layer's attention")
    queries, tokens = list(layout.query_documents.shape), list(layout.documents.shape)
    heads, width = list(index.queries.shape[2:]) if index.queries.dim() == 4 else [-1, -1]
    shapes = [
        ("index queries", index.queries, [*queries, heads, width], "tokens, heads, width"),
        ("index keys", index.keys, [*tokens, width], "tokens, width"),
        ("index weights", index.weights, [*queries, heads], "tokens, heads"),
    ]
    for target in targets:
        shapes += _attention_shapes(target, queries, tokens)
    for name, tensor, expected, axes in shapes:
        if list(tensor.shape) != expected:
            raise TrainingError(
                f"{name} are [batch, {axes}] = {_sizes(expected)} for this layout and these "
                f"queries, got {list(tensor.shape)}{_advice(tensor, expected)}"
            )
    if selected is not None:
        _check_selected(layout, selected, block)


def _attention_shapes(
    target: AttentionInputs, queries: list[int], tokens: list[int]
) -> list[tuple[str, torch.Tensor, list[int], str]]:
    """Return the shapes that a served layer's tensors must have, from its numbers of heads."""
    if target.queries.dim() != 4 or target.keys.dim() != 4:
        heads = key_heads = width = -1
    else:
        heads, key_heads, width = *target.queries.shape[1:2], *target.keys.shape[1::2]
        if key_heads < 1 or heads % key_heads:
            raise TrainingError(
                f"{key_heads} key heads do not divide {heads} heads of attention queries; both are "
                "[batch, heads, tokens, width]"
            )
    rows, axes = queries[0], "heads, tokens, width"
    return [
        ("attention queries", target.queries, [rows, heads, queries[1], width], axes),
        ("attention keys", target.keys, [rows, key_heads, tokens[1], width], axes),
    ]


def _sizes(expected: list[int]) -> str:
    return str(expected).replace("-1", "?")


def _advice(tensor: torch.Tensor, expected: list[int]) -> str:
    """Return advice on how to make a tensor fit, if there is any."""
    if list(tensor.shape) == [*expected, 1]:
        return ": its last dimension has one entry, so give it .squeeze(-1)"
    if tensor.dim() == len(expected) - 1:
        return ": one dimension is missing; a packed row is a batch of one ([None])"
    return ""


@torch.no_grad()
def _check_selected(layout: Layout, selected: torch.Tensor, block: int) -> None:
    """Refuse selections that a gather would count wrongly, or that it cannot use.

    Raises:
        TrainingError: the shape or dtype is wrong, a place is beyond the row's end, or occurs
            twice.
    """
    rows, count = layout.query_documents.shape
    if selected.dim() != 3 or selected.shape[:2] != (rows, count) or selected.is_floating_point():
        raise TrainingError(
            f"selected are integers [batch, tokens, k] = [{rows}, {count}, ?] for this layout, got "
            f"{selected.dtype} {list(selected.shape)}"
        )
    if not selected.numel():
        return
    if (largest := int(selected.max())) >= layout.length:
        raise TrainingError(
            f"selected holds the place {largest}, and a row has {layout.length} tokens: give "
            "places within the row. An engine may return places of its KV cache (SGLang does, "
            "unless it runs with SGLANG_DSA_FUSE_TOPK=0)."
        )
    if any(_has_twice(selected[:, part], layout.length) for part in layout.blocks(block)):
        raise TrainingError(
            "selected holds the same place twice for one query, and each counts once: fill up "
            "with -1"
        )


def _has_twice(selected: torch.Tensor, length: int) -> bool:
    """Return whether any row of ``[B, rows, k]`` names a place twice; -1 may occur often."""
    places = selected.long().where(selected >= 0, length)
    slots = torch.arange(selected.shape[-1], device=selected.device).expand_as(places)
    # Each slot writes its number at its place. If two share a place, one of them reads the other's.
    last = slots.new_empty(*selected.shape[:2], length + 1).scatter_(-1, places, slots)
    return bool(((last.gather(-1, places) != slots) & (selected >= 0)).any())


def _at_least_float32(x: torch.Tensor) -> torch.Tensor:
    return x.to(_accumulator(x.dtype))


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
