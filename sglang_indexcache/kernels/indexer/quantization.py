"""Index-K storage: e4m3 with one scale per token, in the pages that ``contract.py`` describes.

SGLang's ``IndexKeyCache`` and DeepGEMM's paged logits kernel share the layout.
"""

import math

import torch

from sglang_indexcache.kernels.contract import E4M3_MAX, PAGE_TOKENS

AMAX_FLOOR = 1e-4
"""Lower bound of the magnitude from which a row's scale is computed, as in SGLang's
``act_quant``."""


def quantize_e4m3(
    x: torch.Tensor, *, power_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each row to e4m3, scaled so that its largest magnitude becomes 448.

    Args:
        x: ``[..., D]`` floating point.
        power_of_two: round the scale up to a power of two. SGLang does on a GPU where it quantises
            queries by themselves (``act_quant`` with "ue8m0": DeepSeek-V3.2's), not where one
            kernel also rotates them (``fused_q_indexer_rope_first_quant``: GLM-5's), nor where it
            stores keys (``fused_store_index_k_cache``, ``fused_k_indexer_norm_rope_store``).

    Returns:
        ``[..., D]`` float8_e4m3fn and ``[...]`` float32 scales; ``x ~= values * scale``.
    """
    x = x.float()
    amax = x.abs().amax(-1).clamp_min(AMAX_FLOOR)
    scale = amax / E4M3_MAX
    if power_of_two:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    values = (x * (1.0 / scale)[..., None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return values, scale


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Return the orthonormal Walsh-Hadamard transform of the last dimension (a power of two).

    DeepSeek-V3.2 rotates queries and keys with it before quantisation, which spreads outliers
    and leaves every dot product as it was.
    """
    width = x.shape[-1]
    y = x.float()
    half = 1
    while half < width:
        y = y.unflatten(-1, (width // (2 * half), 2, half))
        first, second = y.unbind(-2)
        y = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        half *= 2
    return (y / math.sqrt(width)).to(x.dtype)


def write_pages(
    pages: torch.Tensor, slots: torch.Tensor, values: torch.Tensor, scales: torch.Tensor
) -> None:
    """Store ``[T, D]`` float8_e4m3fn and ``[T]`` float32 scales at physical token slots.

    Args:
        pages: ``[P, contract.page_bytes(D)]`` uint8, written in place.
        slots: ``[T]`` integers, ``page * 64 + offset``.
    """
    head_dim = values.shape[-1]
    page, offset = slots // PAGE_TOKENS, slots % PAGE_TOKENS
    key_view, scale_view = _views(pages, head_dim)
    key_view[page, offset] = values.view(torch.uint8)
    scale_view[page, offset] = scales


def read_pages(
    pages: torch.Tensor, slots: torch.Tensor, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Load quantised keys from physical token slots; the inverse of :func:`write_pages`."""
    page, offset = slots // PAGE_TOKENS, slots % PAGE_TOKENS
    key_view, scale_view = _views(pages, head_dim)
    return key_view[page, offset].view(torch.float8_e4m3fn), scale_view[page, offset]


def _views(pages: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """View a page buffer as ``[P, 64, D]`` key bytes and ``[P, 64]`` float32 scales."""
    key_bytes = PAGE_TOKENS * head_dim
    keys = pages[:, :key_bytes].unflatten(1, (PAGE_TOKENS, head_dim))
    scales = pages[:, key_bytes:].view(torch.float32)
    return keys, scales
