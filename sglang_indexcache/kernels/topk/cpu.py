"""Exact top-k with torch's own selection, made deterministic at the threshold."""

import torch

from sglang_indexcache.kernels.topk.reference import PADDING


def topk_ascending(logits: torch.Tensor, visible: torch.Tensor, topk: int) -> torch.Tensor:
    """Same contract as :func:`sglang_indexcache.kernels.topk.reference.topk_ascending`.

    ``torch.topk`` breaks ties arbitrarily, so only its threshold is used: everything above it is
    kept, and of the positions equal to it the smallest ones fill the row. ``logits`` is
    overwritten with -inf outside the visible range.
    """
    rows, width = logits.shape
    columns = torch.arange(width, device=logits.device)
    outside = columns >= visible[:, None]
    logits.masked_fill_(outside, float("-inf"))
    if width <= topk:
        kept = ~outside
    else:
        threshold = logits.topk(topk, dim=-1, sorted=True).values[:, -1:]
        kept = logits >= threshold
        kept &= ~outside
        _drop_surplus_ties(kept, logits, threshold, topk)
    return _positions(kept, topk)


def _drop_surplus_ties(
    kept: torch.Tensor, logits: torch.Tensor, threshold: torch.Tensor, topk: int
) -> None:
    """Where ties at the threshold make a row too long, keep only its first ties."""
    crowded = (kept.sum(-1) > topk).nonzero().squeeze(-1)
    if crowded.numel() == 0:
        return
    row_logits, row_threshold = logits[crowded], threshold[crowded]
    above = row_logits > row_threshold
    ties = row_logits == row_threshold
    wanted = topk - above.sum(-1, keepdim=True)
    ties &= ties.cumsum(-1) <= wanted
    kept[crowded] = above | ties


def _positions(kept: torch.Tensor, topk: int) -> torch.Tensor:
    """Column numbers of the true entries of each row, packed to the left."""
    result = torch.full((kept.shape[0], topk), PADDING, dtype=torch.int32, device=kept.device)
    counts = kept.sum(-1)
    row, column = kept.nonzero(as_tuple=True)
    first = counts.cumsum(0) - counts
    slot = torch.arange(row.numel(), device=kept.device) - first[row]
    result[row, slot] = column.to(torch.int32)
    return result
