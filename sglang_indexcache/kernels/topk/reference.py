"""Top-k selection, in its most obvious form."""

import torch

from sglang_indexcache.kernels.contract import PADDING


def topk(
    logits: torch.Tensor, visible: torch.Tensor, topk: int, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """:class:`~sglang_indexcache.kernels.contract.TopK`, for any k and integers of any width.

    Ties (``-0.0`` is ``+0.0``) go to the smaller position, so the result is a function of the
    values alone: the same on every rank, in every run, for every implementation.
    """
    selection = torch.full((len(logits), topk), PADDING, dtype=torch.int32, device=logits.device)
    for row, limit, indices in zip(logits, visible.tolist(), selection, strict=True):
        order = torch.sort(row[:limit] + 0.0, descending=True, stable=True).indices[:topk]
        indices[: len(order)] = torch.sort(order).values
    return selection if out is None else out.copy_(selection)
