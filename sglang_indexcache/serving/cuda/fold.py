"""Fold the queries of L layers on a GPU, between SGLang's quantisation and its logits.

SGLang's indexer ends in ``_get_topk_ragged`` (prefill) or ``_get_topk_paged`` (decode, MTP), given
the quantised queries of all heads. In an L layer these get the folded query, written as heads that
score as it does (``kernels/indexer/fold.py``), so that chunks, top-k, slots and graphs stay
SGLang's own. In a prefill one product takes the place of DeepGEMM, which pads to 32 heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import pad

from sglang_indexcache.kernels.indexer.fold import folded_heads, product
from sglang_indexcache.serving.hooks import around
from sglang_indexcache.serving.plan import Plan

_LOGITS = "sglang.srt.layers.attention.dsa.dsa_indexer.resolve_fp8_mqa_logits_fn"


class FoldedLayers:
    """The L layers of one backend.

    Attributes:
        is_scoring: whether one of them is selecting now.
    """

    def __init__(self, plan: Plan, device: torch.device) -> None:
        """Put the slopes of the layers that fold where the queries are."""
        self._slopes = {
            layer: torch.tensor(slopes, device=device)
            for position, (layer, slopes) in enumerate(
                zip(plan.layer_ids, plan.slopes or [None] * len(plan.layer_ids), strict=True)
            )
            if slopes is not None and plan.pattern.fold_at(position)
        }
        self.is_scoring = False

    def __contains__(self, layer: int) -> bool:
        return layer in self._slopes

    def heads(
        self, layer: int, q: torch.Tensor, weights: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what a layer's logits are made of: its own heads, or ``count`` folded ones.

        Args:
            q: ``[T, H, 128]`` float8_e4m3fn.
            weights: ``[T, H, 1]`` float32, with the scales of ``q``.
        """
        if layer not in self:
            return q, weights
        gates = weights.squeeze(-1)[: len(q)].float().contiguous()
        if missing := len(q) - len(gates):  # rows that pad the batch
            gates = pad(gates, (0, 0, 0, missing))
        folded, signs = folded_heads(q.contiguous(), gates, self._slopes[layer], count)
        return folded, signs.unsqueeze(-1)

    @contextmanager
    def scoring(self, layer: int) -> Iterator[None]:
        """Let the product score this layer's prefill, if the layer folds, while the block runs."""
        self.is_scoring = layer in self
        try:
            yield
        finally:
            self.is_scoring = False


def install(current: Callable[[], FoldedLayers | None]) -> None:
    """Let SGLang's prefill score by the product while a folded layer selects.

    Args:
        current: returns the folded layers of the forward in progress.

    Raises:
        UnsupportedEngineError: SGLang could not be wrapped.
    """

    def logits(original: Callable[[], Any]) -> Any:
        layers = current()
        return product if layers is not None and layers.is_scoring else original()

    around(_LOGITS, logits)
