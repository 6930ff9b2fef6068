"""Exact top-k with torch's own selection, made deterministic for ties."""

import torch

from sglang_indexcache.kernels.contract import PADDING


def topk_overwriting(logits: torch.Tensor, visible: torch.Tensor, topk: int) -> torch.Tensor:
    """Select as :func:`sglang_indexcache.kernels.indexer.reference.topk` does; destroy ``logits``.

    ``torch.topk`` breaks ties arbitrarily. Selecting one more than k shows which rows have a tie at
    the boundary; only those rows are selected again. ``logits`` is overwritten with -inf outside
    the visible range, so that no copy of the matrix is made.
    """
    width = logits.shape[1]
    columns = torch.arange(width, device=logits.device)
    first_hidden = int(visible.min()) if visible.numel() else width
    hidden = columns[first_hidden:] >= visible[:, None]
    logits[:, first_hidden:].masked_fill_(hidden, float("-inf"))
    values, chosen = logits.topk(min(topk + 1, width), dim=-1)
    if width > topk:
        ambiguous = (values[:, topk - 1] == values[:, topk]).nonzero().squeeze(-1)
        chosen = chosen[:, :topk]
        if ambiguous.numel():
            threshold = values[ambiguous, topk - 1 : topk]
            chosen[ambiguous] = _first_ties(logits[ambiguous], threshold, topk)
    return _ascending(chosen, visible, topk)


def _first_ties(logits: torch.Tensor, threshold: torch.Tensor, topk: int) -> torch.Tensor:
    """Return positions ``[rows, topk]``: all above the threshold, then the first equal to it."""
    above = logits > threshold
    ties = logits == threshold
    missing = topk - above.sum(-1, keepdim=True)
    selected = above | (ties & (ties.cumsum(-1) <= missing))
    return selected.nonzero()[:, 1].view(-1, topk)


def _ascending(chosen: torch.Tensor, visible: torch.Tensor, topk: int) -> torch.Tensor:
    """Sort each row by position, and replace positions that are not visible by padding."""
    ordered = chosen.sort(-1).values
    ordered = ordered.masked_fill_(ordered >= visible[:, None], PADDING).to(torch.int32)
    return torch.nn.functional.pad(ordered, (0, topk - ordered.shape[1]), value=PADDING)
