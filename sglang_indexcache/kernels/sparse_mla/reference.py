"""Sparse MLA, in its most obvious form."""

import torch


def sparse_mla(
    q: torch.Tensor, latent: torch.Tensor, slots: torch.Tensor, scale: float, value_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of every query over its selected latent rows (absorbed MLA).

    Args:
        q: ``[T, H, D]`` queries, the latent part first and the rotary part last.
        latent: ``[S, D]`` the pool's latent rows; their first ``value_dim`` entries are values.
        slots: ``[T, k]`` integers, rows of ``latent``; -1 is no row.
        scale: softmax scale.
        value_dim: width of the values (512 in DeepSeek-V3.2 and GLM-5).

    Returns:
        ``[T, H, value_dim]`` output in ``q``'s dtype and ``[T, H]`` float32 log-sum-exp in nats.
        A query without any row gets zeros and -inf.
    """
    output = q.new_zeros(*q.shape[:2], value_dim)
    lse = torch.full(q.shape[:2], float("-inf"), dtype=torch.float32)
    for t, chosen in enumerate(slots):
        rows = latent[chosen[chosen >= 0].long()].to(torch.float64)
        if len(rows) == 0:
            continue
        scores = q[t].to(torch.float64) @ rows.T * scale
        lse[t] = torch.logsumexp(scores, -1).float()
        output[t] = (scores.softmax(-1) @ rows[:, :value_dim]).to(q.dtype)
    return output, lse
