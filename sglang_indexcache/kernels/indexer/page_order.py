"""The pages that a layer selected from, first: an order for the next layer's selection.

Layers that follow each other select much the same tokens (paper, section on the overlap of their
indices). The fused kernel lists every logit that may still be selected, so the sooner it has seen
the best, the fewer it lists. The order changes nothing else, and is one for all rows of a request:
the blocks that work on them read the same pages at about the same time.
"""

import torch

from sglang_indexcache.kernels.contract import MAX_PAGES, PAGE_TOKENS, IndexerBatch

SAMPLE_ROWS = 256
"""Rows that are counted, evenly over the batch."""
_SPREAD = 40_503
"""Odd, and ``MAX_PAGES`` over the golden ratio: its multiples modulo ``MAX_PAGES`` are distinct,
and those above any bound are spread evenly. So are pages that nothing tells apart visited."""


def page_order(
    selected: torch.Tensor, batch: IndexerBatch, *, as_slots: bool = False
) -> torch.Tensor:
    """``page_order`` for a batch with the rows and pages of this one, whose selection this is.

    Nothing is read on the host, so it can be captured. A page that requests share counts for each
    of them what all select from it, if the selection is slots.

    Args:
        selected: ``[T, k]`` int32 as of :class:`~.contract.Select`.
        batch: with ``query_starts``.
        as_slots: whether ``selected`` holds slots, not positions.

    Returns:
        ``[B, W]`` int32, in every row a permutation: pages by how many tokens were selected from
        them, the most first; those beyond what the request's last row sees at the end.
    """
    table, starts = batch.block_table, batch.query_starts
    assert starts is not None, "decode visits pages as they come"
    columns = torch.arange(table.shape[1], device=table.device)
    if len(selected) == 0:
        return columns.int().expand(table.shape).contiguous()
    last = batch.visible[(starts[1:] - 1).clamp_min(0)] * (starts[1:] > starts[:-1])
    own = columns < (last[:, None] + PAGE_TOKENS - 1) // PAGE_TOKENS
    spread = columns * _SPREAD % MAX_PAGES
    counts = _selected_of_pages(selected, batch, as_slots)
    key = torch.where(own, counts * MAX_PAGES + spread, -1 - columns)
    return key.argsort(descending=True).int()


def _selected_of_pages(
    selected: torch.Tensor, batch: IndexerBatch, as_slots: bool
) -> torch.Tensor:
    """``[B, W]`` int64: tokens of a sample of rows in each page of each request."""
    table, starts = batch.block_table, batch.query_starts
    assert starts is not None
    requests, width = table.shape
    number = min(SAMPLE_ROWS, len(selected))
    rows = torch.arange(number, device=table.device) * starts[-1].clamp_min(number) // number
    owner = torch.searchsorted(starts[1:].contiguous(), rows, right=True)[:, None]
    page = selected[rows].long() // PAGE_TOKENS
    listed = (page >= 0) & (owner < requests)  # not the rows of padding
    bins = len(batch.pages) if as_slots else requests * width
    index = torch.where(listed, page if as_slots else owner * width + page, bins).flatten()
    counts = index.new_zeros(bins + 1).scatter_add_(0, index, index.new_ones(()).expand_as(index))
    if not as_slots:
        return counts[:bins].view(requests, width)
    return counts[table.clamp(0, bins - 1).long()]  # beyond a request it may hold anything
