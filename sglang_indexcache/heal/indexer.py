"""The lightning indexer with gradients: transformers' runs under ``no_grad``.

It holds the very submodules of transformers' indexer under the same names, so that a state dict
is the same before and after.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from sglang_indexcache.heal.losses import IndexInputs
from sglang_indexcache.heal.sharing import Sharing

Rotation = tuple[torch.Tensor, torch.Tensor]


class LightningIndexer(nn.Module):
    """An F layer's indexer, in at least float32: what an optimiser adds is lost in bfloat16.

    Args:
        original: transformers' indexer of this layer.
        interleaved: whether RoPE turns neighbouring dimensions (GLM-5) or the two halves
            (DeepSeek-V3.2).
        sharing: where selections and index inputs go.
    """

    def __init__(self, original: Any, interleaved: bool, sharing: Sharing) -> None:
        super().__init__()
        original.to(torch.promote_types(original.wk.weight.dtype, torch.float32))
        self.wq_b, self.wk = original.wq_b, original.wk
        self.k_norm, self.weights_proj = original.k_norm, original.weights_proj
        self.layer = int(original.layer_idx)
        self.heads, self.width = int(original.n_heads), int(original.head_dim)
        self.rotated = int(original.qk_rope_head_dim)
        self.interleaved = interleaved
        self.sharing = sharing

    def forward(
        self,
        hidden: torch.Tensor,
        query_latent: torch.Tensor,
        rotation: Rotation,
        *_: Any,
        **__: Any,
    ) -> torch.Tensor:
        """Called by transformers' attention: ``[B, T, k]`` int32 indices, -1 where fewer than k."""
        if not self.sharing.needs_index:
            return self.sharing.no_selection()
        # DSA's detached graph: no gradient of the indexer's may reach the model below it.
        index = self.inputs(hidden.detach(), query_latent.detach(), rotation)
        return self.sharing.select(self.layer, index)

    def inputs(
        self, hidden: torch.Tensor, query_latent: torch.Tensor, rotation: Rotation
    ) -> IndexInputs:
        """Project and rotate.

        Args:
            hidden: ``[B, T, hidden_size]``.
            query_latent: ``[B, T, q_lora_rank]``.
            rotation: cosine and sine, ``[B, T, rotated]`` each.
        """
        dtype = self.wk.weight.dtype
        hidden, query_latent = hidden.to(dtype), query_latent.to(dtype)
        cosine, sine = (table[..., : self.rotated // 2] for table in rotation)
        queries = self.wq_b(query_latent).unflatten(-1, (self.heads, self.width))
        queries = self._rotate(queries, cosine.unsqueeze(2), sine.unsqueeze(2))
        keys = self._rotate(self.k_norm(self.wk(hidden)), cosine, sine)
        scale = self.width**-0.5 * self.heads**-0.5
        weights = self.weights_proj(hidden) * scale
        return IndexInputs(queries, keys, weights)

    def _rotate(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        """RoPE on the first ``rotated`` of ``x``'s last dimension."""
        half = self.rotated // 2
        cosine, sine = cosine.to(x.dtype), sine.to(x.dtype)
        turned, rest = x[..., : self.rotated], x[..., self.rotated :]
        if self.interleaved:
            first, second = turned[..., 0::2], turned[..., 1::2]
        else:
            first, second = turned[..., :half], turned[..., half:]
        # The order of the rotated dimensions does not matter: queries and keys share it.
        return torch.cat(
            (first * cosine - second * sine, second * cosine + first * sine, rest), dim=-1
        )


class BorrowedSelection(nn.Module):
    """In the place of an S layer's indexer: no parameters, the F layer's selection."""

    def __init__(self, layer: int, sharing: Sharing) -> None:
        super().__init__()
        self.layer, self.sharing = layer, sharing

    def forward(self, *_: Any, **__: Any) -> torch.Tensor:
        """``[B, T, k]`` int32 indices of the F layer before."""
        return self.sharing.selection(self.layer)
