"""The contract of top-k selection, in its most obvious form."""

import torch

from sglang_indexcache.kernels.contract import PADDING

__all__ = ["PADDING", "topk", "topk_ascending"]


def topk_ascending(logits: torch.Tensor, visible: torch.Tensor, topk: int) -> torch.Tensor:
    """Select the ``topk`` largest of the first ``visible`` logits of every row.

    Ties (``-0.0`` is ``+0.0``) go to the smaller position, so the result is a function of the
    values alone: the same on every rank, in every run, for every implementation.

    Args:
        logits: ``[T, S]`` float32, no NaN.
        visible: ``[T]`` integers in ``[0, S]``, how many positions each row may see.
        topk: how many to keep.

    Returns:
        ``[T, topk]`` int32 positions, ascending, padded at the end with ``PADDING``.
    """
    rows = []
    for row, limit in zip(logits, visible.tolist(), strict=True):
        order = torch.sort(row[:limit] + 0.0, descending=True, stable=True).indices[:topk]
        kept = torch.sort(order).values.to(torch.int32)
        rows.append(torch.nn.functional.pad(kept, (0, topk - len(kept)), value=PADDING))
    if not rows:
        return torch.empty(0, topk, dtype=torch.int32, device=logits.device)
    return torch.stack(rows)


def topk(
    logits: torch.Tensor, visible: torch.Tensor, topk: int, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """:class:`~sglang_indexcache.kernels.contract.TopK`."""
    chosen = topk_ascending(logits, visible, topk)
    return chosen if out is None else out.copy_(chosen)
