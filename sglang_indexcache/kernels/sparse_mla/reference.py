"""Sparse MLA, in its most obvious form."""

import torch

from sglang_indexcache.kernels.contract import FP8_ROW_BYTES, LATENT_DIM, VALUE_DIM, Kept
from sglang_indexcache.kernels.sparse_mla.layout import dequantize_latent


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
