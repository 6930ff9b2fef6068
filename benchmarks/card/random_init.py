"""Weights and caches for a timed model without a checkpoint: random, and not degenerate.

SGLang's ``--load-format dummy`` draws every tensor within 1e-3 of zero from one seed, norms and
the router's bias as well. Then all tokens go to the same experts, nearly all FP8 weights are zero,
and the index keys of all tokens are alike, so that a top-k sees ties alone. ``initialize`` stands
in for it in the servers that :mod:`benchmarks.card.table_1` starts, and nowhere else.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from benchmarks.kernels.workloads import fill_index_pages, fill_latent_rows
from sglang_indexcache.kernels.contract import FP8_ROW_BYTES, PAGE_BYTES

BLOCK = 128
"""Rows and columns that share an FP8 scale."""
_ROWS_AT_ONCE = 8192
"""Rows of FP8 that are drawn at once: a bank of experts is never held in another precision."""


@torch.no_grad()
def initialize(model: torch.nn.Module, *_: Any, **__: Any) -> None:
    """Draw a model's weights as training starts them, each tensor from a seed of its own name.

    Norms are 1 and biases 0, so that scores choose the experts. A matrix multiplies inputs of unit
    variance into outputs of unit variance, FP8 blocks by their scale.
    """
    for name, tensor in model.state_dict().items():
        if torch.is_floating_point(tensor):
            _draw(name, tensor)


def _draw(name: str, tensor: torch.Tensor) -> None:
    last = name.rpartition(".")[2]
    if last.endswith("weight_scale_inv"):
        tensor.fill_((BLOCK * tensor.shape[-1]) ** -0.5)  # its last dimension counts blocks
    elif last.endswith("bias"):  # the router's correction is called so, too
        tensor.zero_()
    elif tensor.dim() < 2 or "norm" in name:
        tensor.fill_(1.0)
    elif torch.finfo(tensor.dtype).bits < 16:
        rows = tensor.view(-1, tensor.shape[-1])
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            part = rows[start : start + _ROWS_AT_ONCE]
            drawn = torch.empty(part.shape, dtype=torch.float16, device=tensor.device)
            part.copy_(drawn.normal_(generator=_generator(f"{name} {start}", tensor.device)))
    else:
        spread = 1.0 if "embed" in name else tensor.shape[-1] ** -0.5
        tensor.normal_(0, spread, generator=_generator(name, tensor.device))


def _generator(name: str, device: torch.device) -> torch.Generator:
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big")
    return torch.Generator(device=device).manual_seed(seed)


@torch.no_grad()
def fill(pool: Any) -> None:
    """Fill a KV pool as prompts would, so that a decode step reads keys that differ.

    Args:
        pool: SGLang's, of latents and index keys.
    """
    device = pool.kv_buffer[0].device
    torch.manual_seed(0)
    for latents in pool.kv_buffer:
        if latents.shape[-1] * latents.element_size() == FP8_ROW_BYTES:
            fill_latent_rows(latents.view(torch.uint8).view(-1, FP8_ROW_BYTES), device)
        else:
            latents.normal_()
    for keys in pool.index_k_with_scale_buffer:
        if keys.dtype == torch.uint8:
            fill_index_pages(keys.view(-1, PAGE_BYTES), device)
        else:
            keys.normal_()
