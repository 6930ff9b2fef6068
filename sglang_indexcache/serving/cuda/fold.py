"""Fold the queries of L layers on a GPU, between SGLang's quantisation and its logits.

SGLang's indexer ends in ``_get_topk_ragged`` (prefill) or ``_get_topk_paged`` (decode, MTP), given
the quantised queries of all heads. In an L layer these get the folded query, written as heads that
score as it does (``kernels/indexer/fold.py``), so that chunks, top-k, slots and graphs stay
SGLang's own. In a prefill one product takes the place of DeepGEMM, which pads to 32 heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch.nn.functional import pad

from sglang_indexcache.kernels.indexer.fold import folded_heads
from sglang_indexcache.serving.plan import Plan


class FoldedLayers:
    """The L layers of one backend.

    Attributes:
        is_scoring: whether one of them is selecting now.
    """

    def __init__(self, slopes: Mapping[int, torch.Tensor] | None = None) -> None:
        """Take the ``[H]`` float32 slopes of the layers that fold, by layer; None folds none."""
        self._slopes = slopes or {}
        self.is_scoring = False

    @classmethod
    def of(cls, plan: Plan, device: torch.device) -> FoldedLayers:
        """Put the slopes of a plan's L layers where the queries are."""
        return cls(
            {
                plan.layer_ids[position]: torch.tensor(slopes, device=device)
                for position, slopes in enumerate(plan.slopes)
                if slopes is not None and plan.pattern.fold_at(position)
            }
        )

    def __contains__(self, layer: int) -> bool:
        return layer in self._slopes

    def heads(
        self, layer: int, q: torch.Tensor, weights: torch.Tensor, count: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what a layer's logits are made of: its own heads, or ``count`` folded ones.

        Args:
            q: ``[T, H, 128]`` float8_e4m3fn.
            weights: ``[T, H, 1]`` float32, with the scales of ``q``.
            count: None for as many as ``q`` has.
        """
        if layer not in self:
            return q, weights
        gates = weights.squeeze(-1)[: len(q)].float().contiguous()
        if missing := len(q) - len(gates):  # rows that pad the batch
            gates = pad(gates, (0, 0, 0, missing))
        folded, signs = folded_heads(
            q.contiguous(), gates, self._slopes[layer], count or q.shape[1]
        )
        return folded, signs.unsqueeze(-1)

    @contextmanager
    def scoring(self, layer: int) -> Iterator[None]:
        """Let the product score this layer's prefill, if the layer folds, while the block runs."""
        self.is_scoring = layer in self
        try:
            yield
        finally:
            self.is_scoring = False
