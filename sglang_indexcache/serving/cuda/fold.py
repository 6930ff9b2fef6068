"""Fold queries on a GPU, between SGLang's quantisation and its logits.

SGLang's indexer ends in ``_get_topk_ragged`` (prefill) or ``_get_topk_paged`` (decode, MTP), given
the quantised queries of all heads. In an L layer these get the folded query, written as heads that
score as it does (``kernels/indexer/fold.py``), so that chunks, top-k, slots and graphs stay
SGLang's own. In a prefill one product takes the place of DeepGEMM, which pads to 32 heads.

An F layer with candidates (``+cN``) selects by kernels of ours in place of the two methods
(``kernels/indexer/second_stage.py``), where some request may have more tokens than candidates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from sglang_indexcache.kernels.contract import PAGE_TOKENS, Select
from sglang_indexcache.kernels.indexer.fold import folded_heads
from sglang_indexcache.kernels.indexer.second_stage import SecondStage
from sglang_indexcache.serving.plan import Plan

if TYPE_CHECKING:
    from sglang.srt.layers.attention.dsa.dsa_indexer_metadata import DSAIndexerMetadata


class FoldedLayers:
    """The layers of one backend that fold.

    Attributes:
        is_scoring: whether an L layer is selecting now.
    """

    def __init__(self, stages: Mapping[int, SecondStage] | None = None) -> None:
        """Take slopes and factor of each layer that folds; a factor of 1 is an L layer."""
        items = (stages or {}).items()
        self._slopes = {layer: stage.slopes for layer, stage in items if stage.factor == 1}
        self._stages = {layer: stage for layer, stage in items if stage.factor > 1}
        self.is_scoring = False

    @classmethod
    def of(cls, plan: Plan, device: torch.device) -> FoldedLayers:
        """Put the slopes of a plan where the queries are."""
        return cls(
            {
                plan.layer_ids[position]: SecondStage(torch.tensor(slopes, device=device), factor)
                for position, slopes in enumerate(plan.slopes)
                if slopes is not None and (factor := plan.pattern.fold_at(position))
            }
        )

    def __contains__(self, layer: int) -> bool:
        """Return whether it is an L layer."""
        return layer in self._slopes

    def second_stage(self, layer: int, metadata: DSAIndexerMetadata, topk: int) -> Select | None:
        """Return what selects in an F layer among candidates of its folded score.

        None where SGLang's own is right: a layer without, or no more tokens than candidates in any
        row of the page table.
        """
        stage = self._stages.get(layer)
        if stage and metadata.get_page_table_64().shape[1] * PAGE_TOKENS > stage.factor * topk:
            return stage
        return None

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
