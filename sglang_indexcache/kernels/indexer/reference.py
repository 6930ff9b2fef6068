"""The lightning indexer's score, in its most obvious form."""

import torch


def indexer_logits(q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """``logits[t, s] = sum_h weights[t, h] * relu(q[t, h] . keys[s])``.

    The softmax scale and the per-head gate are both inside ``weights``, as SGLang's indexer
    passes them to its kernels.

    Args:
        q: ``[T, H, D]`` rotated index queries.
        keys: ``[S, D]`` rotated, normalised index keys.
        weights: ``[T, H]`` float32, may be negative.

    Returns:
        ``[T, S]`` logits in ``weights``' dtype, without a causal mask.
    """
    dtype = weights.dtype
    per_head = torch.einsum("thd,sd->ths", q.to(dtype), keys.to(dtype))
    return torch.einsum("th,ths->ts", weights, per_head.relu())
