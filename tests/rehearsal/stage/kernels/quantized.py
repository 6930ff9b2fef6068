"""Products of block-quantised FP8: inputs by groups of 128 in a row, weights by 128 times 128."""

from __future__ import annotations

from typing import Any

import torch

from tests.rehearsal.stage.registry import reference

GROUP = 128
E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest finite value of e4m3."""


def quantize(x: torch.Tensor, least: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``[..., K]`` as e4m3, and a float32 scale for each row ``[...]``.

    Args:
        least: what the largest value of a row is taken for where it is smaller.
    """
    scales = (x.double().abs().amax(-1).clamp_min(least) / LARGEST).float()
    values = (x.double() / scales[..., None].double()).clamp(-LARGEST, LARGEST)
    return values.float().to(E4M3), scales


def quantize_groups(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``[..., K]`` as e4m3, and a float32 scale for each 128 values ``[..., K / 128]``."""
    values, scales = quantize(x.unflatten(-1, (-1, GROUP)), 1e-10)
    return values.flatten(-2), scales


def from_groups(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return in float64 what ``quantize_groups`` made."""
    return (values.double().unflatten(-1, (-1, GROUP)) * scales.double()[..., None]).flatten(-2)


def from_blocks(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """``[..., N, K]`` e4m3 by blocks of 128 times 128, the last may be smaller, in float64."""
    assert weight.dtype == E4M3
    assert scales.dtype == torch.float32
    n, k = weight.shape[-2:]
    wide = scales.double().repeat_interleave(GROUP, -2).repeat_interleave(GROUP, -1)
    assert wide.shape[-2] - GROUP < n <= wide.shape[-2]
    return weight.double() * wide[..., :n, :k]


@reference("jit:per_token_group_quant.per_token_group_quant")
def per_token_group_quant(x: torch.Tensor, out: torch.Tensor, scales: torch.Tensor) -> None:
    """Quantise the inputs of a product."""
    assert x.is_contiguous()
    assert out.dtype == E4M3
    values, group_scales = quantize_groups(x)
    out.copy_(values)
    scales.copy_(group_scales)


@reference("deep_gemm:fp8_gemm_nt")
def fp8_gemm_nt(a: Any, b: Any, d: torch.Tensor, **rest: Any) -> None:
    """Write ``a @ b.T`` of FP8 values with their scales, bfloat16; by 64 columns, 128 in depth."""
    n, k = b[0].shape
    assert n % 64 == 0
    assert k % 128 == 0
    assert d.dtype == torch.bfloat16
    d.copy_(from_groups(*a) @ from_blocks(*b).T)
