"""Sparse MLA in its most obvious form, and the FP8 latent cache.

A token of that cache takes 656 bytes, in FlashMLA's format as SGLang writes it: ``512`` e4m3 latent
values, four float32 scales (one for each 128 of them), 64 bfloat16 rotary values. A scale is the
group's largest magnitude over 448, not a power of two.
"""

import torch

from sglang_indexcache.kernels.contract import (
    E4M3_MAX,
    FP8_GROUP,
    FP8_ROW_BYTES,
    LATENT_DIM,
    ROPE_DIM,
    VALUE_DIM,
    Kept,
)

_GROUPS = VALUE_DIM // FP8_GROUP
_ROPE_AT = VALUE_DIM + 4 * _GROUPS


def sparse_mla(
    q: torch.Tensor,
    latent: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
    value_dim: int = VALUE_DIM,
    *,
    sinks: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    kept: Kept | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from every query to its selected latent rows (absorbed MLA), in float64.

    :class:`~sglang_indexcache.kernels.contract.SparseMLA` for any widths and dtypes.

    Args:
        q: ``[T, H, D]``, the latent part first and the rotary part last.
        latent: ``[S, D]`` rows, the first ``value_dim`` (512 in DeepSeek-V3.2 and GLM-5) entries of
            which are values; or ``[S, 656]`` uint8 rows of the FP8 layout.
        slots: ``[T, k]`` integers; -1 stands for no row.
        sinks: ``[H]`` float32.
        lengths: ``[T]`` integers, how many entries of each list are read.

    Returns:
        ``[T, H, value_dim]`` output in ``q``'s dtype and ``[T, H]`` float32 log-sum-exp in nats.
        A query without any row gets zeros and -inf.
    """
    del kept
    if out is None:
        out = q.new_empty(*q.shape[:2], value_dim)
    if lse is None:
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    for t, whole in enumerate(slots):
        listed = whole if lengths is None else whole[: int(lengths[t])]
        valid = listed[listed >= 0].long()
        if len(valid) == 0:
            out[t], lse[t] = 0.0, float("-inf")
            continue
        rows = _rows(latent[valid]).double()
        scores = q[t].double() @ rows.T * scale
        peak = scores.logsumexp(-1)
        values = scores.softmax(-1) @ rows[:, :value_dim]
        if sinks is not None:  # exp(lse) / (exp(lse) + exp(sink))
            values *= torch.sigmoid(peak - sinks.double())[:, None]
        out[t], lse[t] = values.to(out.dtype), peak.float()
    return out, lse


def _rows(stored: torch.Tensor) -> torch.Tensor:
    if stored.dtype != torch.uint8:
        return stored
    assert stored.shape[1] == FP8_ROW_BYTES, stored.shape
    return dequantize_latent(stored)


def mla_tolerance(
    q: torch.Tensor, rows: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bound the distance of one query's output and LSE from exact arithmetic on the same inputs.

    A score is 576 float32 additions. For the output, probabilities and result are rounded to
    bfloat16 (2^-9 each), and the sum over k is in float32.

    Args:
        q: ``[Hq, 576]``, one query row.
        rows: ``[n, 576]``, the latent rows that it selected.

    Returns:
        ``[Hq, 512]`` and ``[Hq]`` float64 absolute bounds.
    """
    wide_q, wide_rows = q.double(), rows.double()
    score_error = (wide_q.abs() @ wide_rows.abs().T).amax(-1) * abs(scale) * LATENT_DIM * 2.0**-24
    probability = (wide_q @ wide_rows.T * scale).softmax(-1)
    magnitude = probability @ wide_rows[:, :VALUE_DIM].abs()
    relative = 2.0**-8 + 2.0**-9 + 2 * score_error + rows.shape[0] * 2.0**-23
    return magnitude * relative[:, None], score_error + 2.0**-20 * (1 + score_error)


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
