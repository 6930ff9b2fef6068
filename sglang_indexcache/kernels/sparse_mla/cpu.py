"""Sparse MLA on a CPU: gather the selected rows of a block of queries, then batched products.

Work and memory follow ``T x k``: no mask over the context is ever made.
"""

import torch

from sglang_indexcache.kernels.contract import FP8_ROW_BYTES, VALUE_DIM
from sglang_indexcache.kernels.sparse_mla.layout import dequantize_latent

GATHER_BYTES = 4 << 20
"""Bound of the gathered latent rows of one block of queries: what stays in the cache."""


def sparse_mla(
    q: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
    value_dim: int = VALUE_DIM,
    *,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    gather_bytes: int = GATHER_BYTES,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`sglang_indexcache.kernels.sparse_mla.reference.sparse_mla`, less precise.

    Same arguments and results, but products are made and rounded in ``q``'s dtype: in bfloat16 the
    scores have 8 bits, which is more than ``mla_tolerance`` allows a GPU kernel.

    Args:
        gather_bytes: bound of the latent rows that are gathered at a time.
    """
    tokens, heads, dim = q.shape
    if out is None:
        out = q.new_empty(tokens, heads, value_dim)
    if lse is None:
        lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    out.zero_()
    lse.fill_(float("-inf"))
    places = torch.arange(1, slots.shape[1] + 1, device=slots.device)
    chosen = torch.where(slots >= 0, places, 0).amax(-1)  # one past each row's last
    longest = int(chosen.max()) if tokens else 0
    if longest == 0:
        return out, lse
    block = max(1, gather_bytes // (longest * dim * q.element_size()))
    scratch = cache.new_empty(min(block, tokens) * longest, cache.shape[1])
    for low in range(0, tokens, block):
        rows = slice(low, min(low + block, tokens))
        width = int(chosen[rows].max())
        if width:
            listed = slots[rows, :width]
            gathered = _gather(cache, listed, scratch)
            values, lse[rows] = _attend(q[rows], gathered, listed < 0, scale, value_dim)
            if sinks is not None:  # exp(lse) / (exp(lse) + exp(sink))
                values = values * torch.sigmoid(lse[rows] - sinks)[..., None]
            out[rows] = values.masked_fill_((chosen[rows] == 0)[:, None, None], 0.0)
    return out, lse


def _gather(cache: torch.Tensor, slots: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """``[count, width, D]`` rows of ``[count, width]`` slots; ``scratch`` receives them."""
    # Padding repeats one of the row's choices: even with weight 0 an unchosen row must not be read.
    readable = torch.where(slots < 0, slots.amax(-1, keepdim=True), slots).clamp_min_(0)
    rows = scratch[: slots.numel()]
    torch.index_select(cache, 0, readable.reshape(-1), out=rows)
    if cache.dtype == torch.uint8:
        assert cache.shape[1] == FP8_ROW_BYTES, cache.shape
        rows = dequantize_latent(rows)
    return rows.view(*slots.shape, -1)


def _attend(
    q: torch.Tensor, rows: torch.Tensor, padding: torch.Tensor, scale: float, value_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """One block of queries over the rows gathered for each; ``padding`` marks those to ignore."""
    scores = torch.bmm(q, rows.transpose(1, 2)).float().mul_(scale)
    scores.masked_fill_(padding.unsqueeze(1), float("-inf"))
    # A query without any row must attend nowhere: with a finite peak its weights are exp(-inf).
    peak = scores.amax(-1, keepdim=True).clamp_min_(torch.finfo(scores.dtype).min)
    weights = scores.sub_(peak).exp_()
    total = weights.sum(-1, keepdim=True)
    lse = (peak + total.log()).squeeze(-1)
    weights /= total.clamp_min_(torch.finfo(scores.dtype).tiny)
    # One product with whole rows: slicing the values out first costs a strided copy.
    return torch.bmm(weights.to(rows.dtype), rows)[..., :value_dim], lse
