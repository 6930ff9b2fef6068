"""The inputs of a lightning indexer's score: queries, keys and weights, projected and rotated."""

from __future__ import annotations

from typing import Any

import torch


def project(
    indexer: Any,
    hidden: torch.Tensor,
    latent: torch.Tensor,
    rotation: tuple[torch.Tensor, torch.Tensor],
    *,
    interleaved: bool,
    asked: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Project and rotate the inputs of an indexer's score.

    Source: ``GlmMoeDsaIndexer`` and ``DeepseekV32Indexer`` of transformers.

    Args:
        indexer: one of these classes, or any object with the same four modules.
        hidden: ``[B, T, hidden_size]``.
        latent: ``[B, T, q_lora_rank]``, normalised.
        rotation: cosine and sine, ``[B, T, rotated]`` each.
        interleaved: whether RoPE rotates neighbouring dimensions instead of the two halves.
        asked: ``[Q]`` places of the queries; None for all.

    Returns:
        Queries ``[B, Q, H, D]`` and keys ``[B, T, D]``, rotated, and weights ``[B, Q, H]``, with
        either sign and without any scale.
    """
    half = rotation[0].shape[-1] // 2

    def rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        cosine, sine = cosine.to(x.dtype), sine.to(x.dtype)
        turned, rest = x.tensor_split([2 * half], dim=-1)
        pairs = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
        first, second = pairs
        # The order of the rotated dimensions does not matter, because queries and keys share it.
        parts = (first * cosine - second * sine, second * cosine + first * sine, rest)
        return torch.cat(parts, dim=-1)

    cosine, sine = (table[..., :half] for table in rotation)
    keys = rotate(indexer.k_norm(indexer.wk(hidden)), cosine, sine)
    if asked is not None:
        hidden, latent, cosine, sine = (x[:, asked] for x in (hidden, latent, cosine, sine))
    width = keys.shape[-1]
    queries = indexer.wq_b(latent).unflatten(-1, (-1, width))
    queries = rotate(queries, cosine.unsqueeze(2), sine.unsqueeze(2))
    weights = indexer.weights_proj(hidden.to(indexer.weights_proj.weight.dtype))
    return queries, keys, weights
