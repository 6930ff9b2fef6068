"""Sparse MLA on a CPU: gather the selected rows for a block of queries, then multiply in a batch.

Work and memory grow with ``T x k``, because no mask over the whole context is made.
"""

import torch

GATHER_BYTES = 4 << 20
"""Upper bound for the latent rows gathered for one block of queries, so that they stay in the
cache."""


def sparse_mla(
    q: torch.Tensor,
    latent: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
    value_dim: int,
) -> torch.Tensor:
    """Compute :func:`sglang_indexcache.kernels.sparse_mla.reference.sparse_mla` in less memory.

    It is less precise: products are computed and rounded in the dtype of ``q`` and ``latent``. In
    bfloat16 the scores have 8 bits, so their error exceeds what ``mla_tolerance`` allows a GPU
    kernel.
    """
    tokens, heads, dim = q.shape
    out = q.new_zeros(tokens, heads, value_dim)
    places = torch.arange(1, slots.shape[1] + 1)
    chosen = torch.where(slots >= 0, places, 0).amax(-1)  # index after each row's last slot
    longest = int(chosen.max()) if tokens else 0
    if longest == 0:
        return out
    block = max(1, GATHER_BYTES // (longest * dim * q.element_size()))
    scratch = latent.new_empty(min(block, tokens) * longest, dim)
    for low in range(0, tokens, block):
        rows = slice(low, min(low + block, tokens))
        width = int(chosen[rows].max())
        if width:
            listed = slots[rows, :width]
            values = _attend(q[rows], _gather(latent, listed, scratch), listed < 0, scale)
            empty = (chosen[rows] == 0)[:, None, None]
            out[rows] = values[..., :value_dim].masked_fill_(empty, 0.0)
    return out


def _gather(latent: torch.Tensor, slots: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """Gather ``[count, width, D]`` rows of ``[count, width]`` slots into ``scratch``."""
    # Padding repeats one of the row's own slots: other latent rows must not be read, even with
    # weight 0.
    readable = torch.where(slots < 0, slots.amax(-1, keepdim=True), slots).clamp_min_(0)
    rows = scratch[: slots.numel()]
    torch.index_select(latent, 0, readable.reshape(-1), out=rows)
    return rows.view(*slots.shape, -1)


def _attend(
    q: torch.Tensor, rows: torch.Tensor, padding: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attend from one block of queries to the rows gathered for each, except ``padding``."""
    scores = torch.bmm(q, rows.transpose(1, 2)).float().mul_(scale)
    scores.masked_fill_(padding.unsqueeze(1), float("-inf"))
    # A query without any row must attend to nothing: with a finite peak its weights are exp(-inf) =
    # 0.
    peak = scores.amax(-1, keepdim=True).clamp_min_(torch.finfo(scores.dtype).min)
    weights = scores.sub_(peak).exp_()
    weights /= weights.sum(-1, keepdim=True).clamp_min_(torch.finfo(scores.dtype).tiny)
    # Multiply whole rows: slicing the values out first would cost a strided copy.
    return torch.bmm(weights.to(rows.dtype), rows)
