"""Rotary position embedding, in place: FlashInfer's and SGLang's compiled forms."""

from __future__ import annotations

import torch

from tests.rehearsal.stage import registry
from tests.rehearsal.stage.registry import reference


def rotate(
    x: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor, *, neox: bool
) -> torch.Tensor:
    """Return ``x`` ``[T, H, D]`` with its first dimensions rotated, in float64.

    Args:
        cos_sin: ``[positions, R]``, cosines in the first half and sines in the second.
        neox: pairs are the two halves of the rotated part, else its even and odd places.
    """
    half = cos_sin.shape[-1] // 2
    table = cos_sin[positions.long()].double()[:, None]
    cos, sin = table[..., :half], table[..., half:]
    rotated, rest = x[..., : 2 * half].double(), x[..., 2 * half :].double()
    if neox:
        a, b = rotated[..., :half], rotated[..., half:]
        rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    else:
        a, b = rotated[..., ::2], rotated[..., 1::2]
        rotated = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    return torch.cat((rotated, rest), -1)


@reference("jit:fused_rope.run_rope")
def run_rope(
    q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor
) -> None:
    """Rotate queries and keys ``[T, H, R]`` in place; the pairing is compiled in."""
    for x in (q, k):
        x.copy_(rotate(x, cos_sin, positions, neox=registry.compiled_with[1] == "true"))


@reference("jit:rotary_embedding.rotary_embedding")
def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin: torch.Tensor,
    neox: bool,
) -> None:
    """Rotate queries and keys ``[T, H * head_size]`` in place."""
    for x in (query, key):
        if x is not None:
            heads = x.view(len(positions), -1, head_size)
            heads.copy_(rotate(heads, cos_sin, positions, neox=neox))
