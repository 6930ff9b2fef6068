"""The FP8 latent cache: 656 bytes a token, FlashMLA's format as SGLang writes it.

``512`` e4m3 latent values, four float32 scales (one for each 128 of them), 64 bfloat16 rotary
values. A scale is the group's largest magnitude over 448, not a power of two.
"""

import torch

from sglang_indexcache.kernels.contract import FP8_GROUP, FP8_ROW_BYTES, ROPE_DIM, VALUE_DIM

E4M3_MAX = 448.0
_GROUPS = VALUE_DIM // FP8_GROUP
_ROPE_AT = VALUE_DIM + 4 * _GROUPS


def quantize_latent(rows: torch.Tensor) -> torch.Tensor:
    """Pack ``[N, 576]`` bfloat16 as ``[N, 656]`` uint8 (SGLang's ``quantize_k_cache``, "fast").

    A group of zeros gets scale 1: dividing by its true scale, 0, would store NaN.
    """
    packed = torch.empty(rows.shape[0], FP8_ROW_BYTES, dtype=torch.uint8, device=rows.device)
    groups = rows[:, :VALUE_DIM].float().unflatten(1, (_GROUPS, FP8_GROUP))
    scales = groups.abs().amax(-1) / E4M3_MAX
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    values = (groups * scales.reciprocal()[..., None]).clamp(-E4M3_MAX, E4M3_MAX)
    packed[:, :VALUE_DIM] = values.flatten(1).to(torch.float8_e4m3fn).view(torch.uint8)
    packed[:, VALUE_DIM:_ROPE_AT] = scales.view(torch.uint8)
    packed[:, _ROPE_AT:] = rows[:, -ROPE_DIM:].contiguous().view(torch.uint8)
    return packed


def dequantize_latent(packed: torch.Tensor) -> torch.Tensor:
    """Return the bfloat16 rows ``[N, 576]`` that FP8 rows ``[N, 656]`` encode."""
    values = packed[:, :VALUE_DIM].contiguous().view(torch.float8_e4m3fn).float()
    scales = packed[:, VALUE_DIM:_ROPE_AT].contiguous().view(torch.float32)
    latent = values.unflatten(1, (_GROUPS, FP8_GROUP)) * scales[..., None]
    rope = packed[:, _ROPE_AT:].contiguous().view(torch.bfloat16)
    return torch.cat([latent.flatten(1).bfloat16(), rope], dim=1)
