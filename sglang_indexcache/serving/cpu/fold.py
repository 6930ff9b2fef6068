"""Folded selection on a CPU: the arithmetic of ``sglang_indexcache.fold``, blocked and paged.

A folded layer ranks keys by one query in place of all heads. In float32, whatever the keys are
stored in: as transformers' reference does, and one product costs little beside those that it saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from sglang_indexcache.kernels.contract import PADDING
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.cpu.select import (
    LOGITS_BYTES,
    GatherKeys,
    HostBatch,
    every_visible,
    row_logits,
    select_topk,
)
from sglang_indexcache.serving.cpu.topk import topk_overwriting
from sglang_indexcache.serving.rows import patterns_of_requests

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    from sglang_indexcache.serving.cpu.backend import CpuIndexCacheBackend


@dataclass(frozen=True)
class LayerSelection:
    """Arguments of :func:`select_topk` in a layer of a forward, by its names."""

    q: torch.Tensor
    weights: torch.Tensor
    gather_keys: GatherKeys
    batch: HostBatch
    topk: int

    def of(self, members: Sequence[int]) -> tuple[torch.Tensor, LayerSelection]:
        """Return the rows of some of the requests, and the selection in these."""
        starts = [0, *accumulate(self.batch.query_lens)]
        rows = torch.cat([torch.arange(starts[b], starts[b + 1]) for b in members])
        batch = HostBatch(
            tuple(self.batch.query_lens[b] for b in members),
            tuple(self.batch.key_lens[b] for b in members),
            self.batch.slots[members],
        )
        return rows, replace(self, q=self.q[rows], weights=self.weights[rows], batch=batch)

    def exact(self) -> torch.Tensor:
        """Select by the exact score."""
        return select_topk(self.q, self.weights, self.gather_keys, self.batch, self.topk)

    def folded(self, slopes: torch.Tensor, factor: int) -> torch.Tensor:
        """Select by the folded score, or among ``factor`` times as many candidates of it."""
        query = torch.einsum("thd,th->td", self.q.float(), self.weights * slopes)
        candidates = select_topk(
            query[:, None],
            torch.ones(len(query), 1),
            lambda slots: self.gather_keys(slots).float(),
            self.batch,
            factor * self.topk,
            rectified=False,
        )
        return candidates if factor == 1 else self.best_of(candidates)

    def best_of(self, candidates: torch.Tensor) -> torch.Tensor:
        """Select of each row's candidates by the exact score.

        Args:
            candidates: ``[T, n]`` int32 positions, ascending, -1 padded.
        """
        result = every_visible(self.batch, len(self.q), self.topk)
        undecided = (self.batch.visible > self.topk).nonzero()[:, 0]
        slots, width = self.batch.physical_slots(candidates), self.q.shape[2]
        block = max(1, LOGITS_BYTES // (4 * width * candidates.shape[1]))
        for rows in torch.split(undecided, block):
            keys = self.gather_keys(slots[rows].clamp_min(0).flatten()).view(len(rows), -1, width)
            logits = row_logits(self.q[rows], self.weights[rows], keys)
            counts = (candidates[rows] != PADDING).sum(1)
            chosen = topk_overwriting(logits, counts, self.topk)
            result[rows] = candidates[rows].gather(1, chosen.long())
        return result


@dataclass(frozen=True)
class FoldingSelector:
    """Stands in for :func:`select_topk` in a layer that folds for some request of a forward.

    Attributes:
        slopes: ``[H]``, one a head.
        factors: of each request of the batch how many times as many candidates as a list holds its
            folded score picks: 1 where that is the selection, 0 where the score stays exact, None
            where the layer is S for it.
    """

    slopes: torch.Tensor
    factors: Sequence[int | None]

    def __call__(self, *arguments: Any) -> torch.Tensor:
        """Select as :func:`select_topk` does, each request's rows by its own factor.

        Rows of a request whose layer is S select nothing; the index buffer keeps what they had.
        """
        selection = LayerSelection(*arguments)
        result = torch.full((len(selection.q), selection.topk), PADDING, dtype=torch.int32)
        for factor in sorted({f for f in self.factors if f is not None}):
            rows, part = selection.of(
                [b for b, value in enumerate(self.factors) if value == factor]
            )
            result[rows] = part.folded(self.slopes, factor) if factor else part.exact()
        return result


@lru_cache(maxsize=256)
def _tensor(slopes: tuple[float, ...]) -> torch.Tensor:
    """Return ``[H]`` float32, made once for all forwards."""
    return torch.tensor(slopes)


def selector_of(
    backend: CpuIndexCacheBackend, batch: ForwardBatch, layer: int
) -> FoldingSelector | None:
    """Return what selects in ``layer`` of a forward; None where every request's score is exact."""
    plan, position = backend.active.plan, backend.active.position(layer)
    slopes = plan.slopes[position] if plan.slopes else None
    patterns = backend.index_buffer.rows.patterns
    if slopes is None or not any(pattern.fold_at(position) for pattern in patterns):
        return None
    requests = len(backend.batch.query_lens)
    by_row: Sequence[Pattern] = patterns * requests
    if len(patterns) > 1:
        by_row = patterns_of_requests(batch)
    factors = [p.fold_at(position) if p.is_full(position) else None for p in by_row]
    return FoldingSelector(_tensor(slopes), factors)
