"""This package's indexers and attention inside a transformers DSA model.

It works on ``DeepseekV32ForCausalLM`` and ``GlmMoeDsaForCausalLM`` through two extension points of
transformers: a registered attention function and a prepared mask. Parameters keep their names.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from sglang_indexcache.checkpoint import Checkpoint
from sglang_indexcache.errors import TrainingError
from sglang_indexcache.lab.heal.forward_state import Sharing
from sglang_indexcache.lab.heal.losses import AttentionInputs, IndexInputs
from sglang_indexcache.lab.heal.packing import Layout
from sglang_indexcache.lab.index_inputs import project
from sglang_indexcache.models import TRAINABLE
from sglang_indexcache.pattern import Pattern

ATTENTION = "indexcache_training"
"""Name of the attention function, as transformers' ``attn_implementation``."""

Rotation = tuple[torch.Tensor, torch.Tensor]


def is_indexer(name: str) -> bool:
    """Return whether a parameter of this name belongs to an indexer."""
    return ".indexer." in name


def install(model: PreTrainedModel, pattern: Pattern, sharing: Sharing) -> None:
    """Replace a model's indexers and attention by ours.

    Raises:
        TrainingError: the model's type is unknown.
        PatternError: the pattern has F where the model has no indexer.
    """
    kind = model.config.model_type
    if kind not in TRAINABLE:
        raise TrainingError(
            f"a {kind} model cannot be healed: it has no indexers that are known here. Models of "
            f"the types {' and '.join(TRAINABLE)} can be."
        )
    config = {**model.config.to_dict(), "architectures": [TRAINABLE[kind].architecture]}
    pattern.check_checkpoint(Checkpoint.from_config(config).own)
    interleaved = TRAINABLE[kind].interleaved
    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, _no_mask)
    model.set_attn_implementation(ATTENTION)
    model.config.indexer_types = pattern.to_indexer_types()
    for number, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        attention.sharing = sharing
        if pattern.is_full(number):
            attention.indexer = LightningIndexer(attention.indexer, interleaved, sharing)
        else:
            attention.indexer = BorrowedSelection(number, sharing)


def _no_mask(*_: Any, **__: Any) -> torch.Tensor:
    """Make a placeholder mask: attention and indexers mask by the layout, block by block."""
    return torch.empty(1, 1, 1, 1)


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Run our attention for transformers, and add this layer's distillation term."""
    del attention_mask  # the layout holds the same in O(L)
    sharing: Sharing = module.sharing
    layer = module.layer_idx
    layout = sharing.layout
    output = attend(query, key, value, scaling, layout, sharing.attended(layer), sharing.block)
    sharing.distil(layer, AttentionInputs(query.detach(), key.detach(), scaling))
    return output, None


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    layout: Layout,
    selected: torch.Tensor | None,
    block: int,
) -> torch.Tensor:
    """Compute the same attention as transformers' eager path with the same top-k mask.

    Args:
        queries: ``[B, N, T, d]``.
        keys: ``[B, N, T, d]``.
        values: ``[B, N, T, v]``.
        selected: ``[B, T, k]`` top-k indices padded with -1; None attends to every visible key.

    Returns:
        ``[B, T, N, v]``.
    """

    def attend_block(rows: slice) -> torch.Tensor:
        visible = slice(rows.stop)
        return scaled_dot_product_attention(
            queries[:, :, rows],
            keys[:, :, visible],
            values[:, :, visible],
            attn_mask=layout.attended(rows, selected).unsqueeze(1),
            scale=scale,
        )

    # The backward pass makes each block's mask again, because all masks together would be O(L^2).
    outputs = [
        checkpoint(attend_block, rows, use_reentrant=False, preserve_rng_state=False)
        for rows in layout.blocks(block)
    ]
    return torch.cat(outputs[::-1], dim=2).transpose(1, 2)


class LightningIndexer(nn.Module):
    """An F layer's indexer with gradients; transformers' own runs under ``no_grad``.

    It computes in at least float32, because an optimiser's small updates are lost in bfloat16.

    It holds the same submodules as transformers' indexer under the same names, so that a state dict
    is the same before and after.

    Args:
        interleaved: whether RoPE rotates neighbouring dimensions (GLM-5) or the two halves
            (DeepSeek-V3.2).
    """

    def __init__(self, original: Any, interleaved: bool, sharing: Sharing) -> None:
        super().__init__()
        original.to(torch.promote_types(original.wk.weight.dtype, torch.float32))
        self.wq_b, self.wk = original.wq_b, original.wk
        self.k_norm, self.weights_proj = original.k_norm, original.weights_proj
        self.layer = int(original.layer_idx)
        self.heads, self.width = int(original.n_heads), int(original.head_dim)
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
        """Select for transformers' attention: ``[B, T, k]`` int32, padded with -1."""
        if not self.sharing.needs_index:
            return self.sharing.no_selection()
        # DSA detaches here: no gradient from the indexer may reach the model below it.
        index = self.inputs(hidden.detach(), query_latent.detach(), rotation)
        return self.sharing.select(self.layer, index)

    def inputs(
        self,
        hidden: torch.Tensor,
        query_latent: torch.Tensor,
        rotation: Rotation,
        places: torch.Tensor | None = None,
    ) -> IndexInputs:
        """Project and rotate the inputs of this indexer's score.

        Args:
            hidden: ``[B, T, hidden_size]``.
            query_latent: ``[B, T, q_lora_rank]``.
            rotation: cosine and sine, ``[B, T, rotated]`` each.
            places: ``[Q]`` places of the queries; None for all.
        """
        dtype = self.wk.weight.dtype
        queries, keys, weights = project(
            self,
            hidden.to(dtype),
            query_latent.to(dtype),
            rotation,
            interleaved=self.interleaved,
            asked=places,
        )
        return IndexInputs(queries, keys, weights * (self.width**-0.5 * self.heads**-0.5))


class BorrowedSelection(nn.Module):
    """Stand-in for an S layer's indexer, without parameters; it returns the F layer's selection."""

    def __init__(self, layer: int, sharing: Sharing) -> None:
        super().__init__()
        self.layer, self.sharing = layer, sharing

    def forward(self, *_: Any, **__: Any) -> torch.Tensor:
        """Return the ``[B, T, k]`` int32 indices of the preceding F layer."""
        return self.sharing.selection(self.layer)
