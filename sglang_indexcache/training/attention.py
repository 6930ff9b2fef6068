"""Main attention over all visible or over the selected keys, a block of queries at a time."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from sglang_indexcache.training.packing import Layout, selected_mask


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    layout: Layout,
    selected: torch.Tensor | None,
    block: int,
) -> torch.Tensor:
    """Attention that transformers' eager path gives with the same top-k mask.

    Args:
        queries: ``[B, N, T, d]``.
        keys: ``[B, N, T, d]``.
        values: ``[B, N, T, v]``.
        scale: multiplies the dot products.
        layout: who sees whom.
        selected: ``[B, T, k]`` top-k indices padded with -1; None attends to every visible key.
        block: queries per block.

    Returns:
        ``[B, T, N, v]``.
    """
    outputs = []
    for rows in layout.blocks(block):
        mask = layout.visible(rows)
        if selected is not None:
            mask = mask & selected_mask(selected[:, rows], layout.length)
        outputs.append(
            scaled_dot_product_attention(
                queries[:, :, rows], keys, values, attn_mask=mask.unsqueeze(1), scale=scale
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2)
