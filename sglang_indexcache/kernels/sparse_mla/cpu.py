"""Sparse MLA on a CPU: gather the selected rows of a block of queries, then batched products.

Work and memory follow ``T x k``: no mask over the context is ever made.
"""

import torch

GATHER_BYTES = 4 << 20
"""Bound of the gathered latent rows of one block of queries: what stays in the cache."""


def sparse_mla(
    q: torch.Tensor,
    latent: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
    value_dim: int,
    *,
    gather_bytes: int = GATHER_BYTES,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Same contract as :func:`sglang_indexcache.kernels.sparse_mla.reference.sparse_mla`.

    Every row of ``slots`` must have its padding at the end.
    """
    tokens, heads, dim = q.shape
    output = q.new_zeros(tokens, heads, value_dim)
    lse = torch.full((tokens, heads), float("-inf"), dtype=torch.float32, device=q.device)
    chosen = (slots >= 0).sum(-1)
    longest = int(chosen.max()) if tokens else 0
    if longest == 0:
        return output, lse
    block = max(1, gather_bytes // (longest * dim * latent.element_size()))
    scratch = latent.new_empty(min(block, tokens) * longest, dim)
    for low in range(0, tokens, block):
        high = min(low + block, tokens)
        width = int(chosen[low:high].max())
        if width:
            output[low:high], lse[low:high] = _attend(
                q[low:high], latent, slots[low:high, :width], scale, value_dim, scratch
            )
    return output, lse


def _attend(
    q: torch.Tensor,
    latent: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
    value_dim: int,
    scratch: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One block of queries; ``scratch`` receives the gathered rows."""
    count, width = slots.shape
    rows = scratch[: count * width]
    # Padding repeats the row's first choice: even with weight 0 an unchosen row must not be read.
    readable = torch.where(slots < 0, slots[:, :1], slots).clamp_min_(0)
    torch.index_select(latent, 0, readable.reshape(-1), out=rows)
    rows = rows.view(count, width, -1)
    scores = torch.bmm(q, rows.transpose(1, 2)).float().mul_(scale)
    scores.masked_fill_((slots < 0).unsqueeze(1), float("-inf"))
    # A query without any row must attend nowhere: with a finite peak its weights are exp(-inf).
    peak = scores.amax(-1, keepdim=True).clamp_min_(torch.finfo(scores.dtype).min)
    weights = scores.sub_(peak).exp_()
    total = weights.sum(-1, keepdim=True)
    lse = (peak + total.log()).squeeze(-1)
    weights /= total.clamp_min_(torch.finfo(scores.dtype).tiny)
    # One product with whole rows: slicing the values out first costs a strided copy.
    output = torch.bmm(weights.to(rows.dtype), rows)[..., :value_dim]
    return output.masked_fill_(slots[:, :1, None] < 0, 0.0), lse
