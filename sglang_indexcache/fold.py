"""A folded indexer: one query ranks the keys in place of all heads.

An indexer's score is ``sum_h w_h relu(q_h . k)``. With the slope ``a_h`` of the line that fits
head h's ReLU best, ``sum_h a_h w_h (q_h . k)`` is nearly the same score, and it is one dot
product with the folded query ``q' = sum_h a_h w_h q_h``. It selects by itself, or picks ``factor``
times as many candidates, of which the exact score keeps the best: exact wherever a query sees no
more tokens than that. A positive factor of all scores (the softmax scale, ``n_heads``) changes no
selection and is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from sglang_indexcache.errors import CheckpointError
from sglang_indexcache.indexer import project
from sglang_indexcache.models import TRAINABLE

BLOCK = 256
"""Queries that are scored at once: what bounds the memory."""


@dataclass(frozen=True)
class IndexRow:
    """The inputs of an indexer's score, for queries that see the same keys.

    Attributes:
        queries: ``[B, S, H, D]`` float32, rotated.
        keys: ``[B, T, D]`` float32, rotated.
        weights: ``[B, S, H]`` float32, of either sign.
        visible: ``[B, S, T]`` bool.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    weights: torch.Tensor
    visible: torch.Tensor

    def part(self, rows: slice, end: int | None = None) -> IndexRow:
        """Return some of the queries, with all keys or those before ``end``."""
        keys, visible = self.keys[:, :end], self.visible[:, rows, :end]
        return IndexRow(self.queries[:, rows], keys, self.weights[:, rows], visible)

    def blocks(self, size: int = BLOCK) -> Iterator[IndexRow]:
        """Yield the same, ``size`` queries at a time."""
        for start in range(0, self.queries.shape[1], size):
            yield self.part(slice(start, start + size))

    def products(self) -> torch.Tensor:
        """Return ``[B, S, H, T]``: every head's ``q_h . k``."""
        return torch.einsum("bshd,btd->bsht", self.queries, self.keys)

    def exact(self) -> torch.Tensor:
        """Return ``[B, S, T]``, the indexer's own score: -inf where a query sees no such key."""
        scores = torch.einsum("bsht,bsh->bst", self.products().relu_(), self.weights)
        return scores.masked_fill_(~self.visible, -torch.inf)

    def folded(self, slopes: torch.Tensor) -> torch.Tensor:
        """Return ``[B, S, T]``, the folded score: -inf where a query sees no such key.

        Args:
            slopes: ``[H]``, one number a head; all the same is plain folding.
        """
        query = torch.einsum("bshd,bsh->bsd", self.queries, self.weights * slopes)
        return (query @ self.keys.transpose(1, 2)).masked_fill_(~self.visible, -torch.inf)


def select(row: IndexRow, topk: int, slopes: torch.Tensor | None, factor: int = 1) -> torch.Tensor:
    """Select for every query the ``topk`` best tokens that it sees.

    Args:
        slopes: ``[H]``; None selects by the exact score.
        factor: how many times ``topk`` candidates the exact score chooses from; 1: the folded
            score selects by itself.

    Returns:
        ``[B, S, min(topk, T)]`` int32, ascending; of equal scores the smaller positions. Where a
        query sees fewer tokens, the rest are tokens that it does not see, as transformers' are.
    """
    length = row.keys.shape[1]
    count = min(topk, length)
    positions = []
    for part in row.blocks():
        if slopes is None:
            marked = largest(part.exact(), count)
        else:
            marked = largest(part.folded(slopes), min(factor * topk, length))
            if factor > 1:
                marked = largest(part.exact().masked_fill_(~marked, -torch.inf), count)
        positions.append(places(marked))
    return torch.cat(positions, dim=1)


def largest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Mark the ``count`` largest of each row (bool), of equal ones those that come first."""
    least = scores.topk(count, dim=-1).values[..., -1:]
    above, level = scores > least, scores == least
    remaining = count - above.sum(-1, keepdim=True)
    return above | (level & (level.cumsum(-1) <= remaining))


def places(marked: torch.Tensor) -> torch.Tensor:
    """Return the positions marked in ``[B, S, T]`` bool, as many in each row: int32, ascending."""
    return marked.nonzero()[:, -1].view(*marked.shape[:2], -1).to(torch.int32)


class SlopeSums:
    """Sums over pairs of a query and a key that it sees, from which one layer's slopes follow.

    Sums of different texts may be added. They are float64 whatever the model computes in.

    Args:
        heads: of the indexer.
    """

    def __init__(self, heads: int) -> None:
        self.pairs = 0
        self.sums = torch.zeros(4, heads, dtype=torch.float64)
        """Sums of ``x``, ``x^2``, ``relu(x)`` and ``relu(x) x = relu(x)^2``, ``x = q_h . k``."""

    def __add__(self, other: SlopeSums) -> SlopeSums:
        total = SlopeSums(self.sums.shape[1])
        total.pairs, total.sums = self.pairs + other.pairs, self.sums + other.sums
        return total

    def add(self, row: IndexRow) -> None:
        """Count the pairs of one text in."""
        for part in row.blocks():
            x = part.products().masked_fill_(~part.visible[:, :, None], 0.0)
            right = x.clamp_min(0.0)
            moments = (x, x * x, right, right * right)
            terms = [values.sum((0, 1, 3), dtype=torch.float64) for values in moments]
            self.sums += torch.stack(terms).cpu()
            self.pairs += int(part.visible.sum())

    def slopes(self) -> torch.Tensor:
        """Return ``[H]`` float32 ``cov(relu(x), x) / var(x)``, 0 (never positive) to 1 (always).

        A head whose products are all alike orders nothing: it has 1 or 0, as its ReLU lets it
        through or not.

        Raises:
            CheckpointError: there are no pairs.
        """
        if not self.pairs:
            raise CheckpointError("slopes are fitted to text, and no text was read. Give some.")
        x, square, right, product = self.sums / self.pairs
        variance, covariance = square - x * x, product - right * x
        flat = variance <= 1e-12 * square
        slope = torch.where(flat, (x > 0).double(), covariance / variance.where(~flat, 1.0))
        return slope.clamp(0.0, 1.0).float()


def read_row(
    indexer: Any,
    hidden_states: torch.Tensor,
    q_resid: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    past_key_values: Any = None,
) -> IndexRow:
    """Compute what a transformers indexer multiplies; the arguments are those of its forward.

    Keys are added to the cache as the indexer itself would. Source: ``GlmMoeDsaIndexer`` and
    ``DeepseekV32Indexer`` of transformers.

    Raises:
        CheckpointError: the indexer is another model's.
    """
    del position_ids  # transformers' own do not read it either
    check_can_fold(indexer)
    interleaved = TRAINABLE[indexer.config.model_type].interleaved
    queries, keys, weights = project(
        indexer, hidden_states, q_resid, position_embeddings, interleaved=interleaved
    )
    if past_key_values is not None:
        keys = past_key_values.update_indexer(keys, indexer.layer_idx)
    allowed = attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
    visible = allowed.expand(*queries.shape[:2], keys.shape[1])
    return IndexRow(queries.float(), keys.float(), weights.float(), visible)


def folded(indexer: Any, slopes: torch.Tensor, factor: int = 1) -> Callable[..., torch.Tensor]:
    """Make a forward for a transformers indexer that selects by its folded score.

    It is a reference: it computes all that it compares, so it shows quality and no speed.

    Args:
        slopes: ``[H]``.
        factor: as in :func:`select`.
    """

    @torch.no_grad()
    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        row = read_row(indexer, *args, **kwargs)
        return select(row, indexer.index_topk, slopes.to(row.keys.device), factor)

    return forward


@contextmanager
def replaced(
    indexers: Mapping[int, Any], select: Callable[[int, IndexRow], torch.Tensor]
) -> Iterator[None]:
    """Let ``select`` answer in the place of transformers' indexers while the block runs.

    Args:
        indexers: by layer.
        select: given the layer and what its indexer multiplies; returns what :func:`select` does.
    """

    def stand_in(layer: int, indexer: Any) -> Callable[..., torch.Tensor]:
        @torch.no_grad()
        def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            return select(layer, read_row(indexer, *args, **kwargs))

        return forward

    for layer, indexer in indexers.items():
        indexer.forward = stand_in(layer, indexer)
    try:
        yield
    finally:
        for indexer in indexers.values():
            del indexer.forward


def check_can_fold(indexer: Any) -> None:
    """Raise CheckpointError unless :func:`read_row` knows this indexer."""
    if getattr(getattr(indexer, "config", None), "model_type", None) not in TRAINABLE:
        raise CheckpointError(
            f"a {type(indexer).__name__} cannot be folded: folding knows the indexers of "
            f"{' and '.join(family.architecture for family in TRAINABLE.values())}. Use a pattern "
            "of F and S."
        )
