"""The contract of top-k selection, in its most obvious form."""

import torch

PADDING = -1
"""What fills a row that has fewer candidates than k."""


def topk_ascending(logits: torch.Tensor, visible: torch.Tensor, topk: int) -> torch.Tensor:
    """Select the ``topk`` largest of the first ``visible`` logits of every row.

    Ties go to the smaller position, so the result is a function of the values alone: the same
    on every rank, in every run, for every implementation.

    Args:
        logits: ``[T, S]`` float32, finite or -inf.
        visible: ``[T]`` integers in ``[0, S]``, how many positions each row may see.
        topk: how many to keep.

    Returns:
        ``[T, topk]`` int32 positions, ascending, padded at the end with ``PADDING``.
    """
    rows = []
    for row, limit in zip(logits, visible.tolist(), strict=True):
        order = torch.sort(row[:limit], descending=True, stable=True).indices[:topk]
        kept = torch.sort(order).values.to(torch.int32)
        rows.append(torch.nn.functional.pad(kept, (0, topk - len(kept)), value=PADDING))
    if not rows:
        return torch.empty(0, topk, dtype=torch.int32)
    return torch.stack(rows)
