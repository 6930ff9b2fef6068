"""The pages that a layer selected from, first: an order for the next layer's selection.

Layers that follow each other select much the same tokens: why they can share a selection at all.
The fused kernel lists every logit that may still be selected, so the sooner it has seen the best,
the fewer it lists. The order changes nothing else, and is one for all rows of a request: the blocks
that work on them read the same pages at about the same time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_indexcache.kernels.contract import MAX_PAGES, PAGE_TOKENS, IndexerBatch

SAMPLE_ROWS = 256
"""Rows whose tokens are counted, evenly over the batch."""
_SPREAD = 40_503
"""Odd, and ``MAX_PAGES`` over the golden ratio: its multiples modulo ``MAX_PAGES`` are distinct,
and those above any bound are spread evenly. So are pages that nothing tells apart visited."""


@dataclass(frozen=True)
class HotPages:
    """Orders pages by what was selected from them; what the layers of one forward have in common.

    Nothing is read on the host, so it can be captured. Bin 0 counts padding, the last one nothing.

    Attributes:
        rows: ``[n]`` int64, of the sample.
        first: ``[n or 1, 1]`` int64, the bin of each row's page 0: of its request, or of the pool.
        places: ``[B, W]`` int64, the bin of each page of each request.
        ranks: ``[B, W]`` int64, decides between pages with equally many tokens; below 0 for those
            beyond what the request's last row sees.
        bins: how many there are.
        as_slots: whether selections hold slots, not positions. With slots a page that requests
            share counts for each of them what all select from it.
    """

    rows: torch.Tensor
    first: torch.Tensor
    places: torch.Tensor
    ranks: torch.Tensor
    bins: int
    as_slots: bool

    @classmethod
    def of(cls, batch: IndexerBatch, *, as_slots: bool = False) -> HotPages:
        """For selections of a batch with ``query_starts`` and at least one row."""
        table, starts = batch.block_table, batch.query_starts
        assert starts is not None, "decode visits pages as they come"
        (requests, width), number = table.shape, min(SAMPLE_ROWS, len(batch.visible))
        columns = torch.arange(width, device=table.device)
        rows = torch.arange(number, device=table.device) * starts[-1].clamp_min(number) // number
        if as_slots:
            bins = len(batch.pages) + 2
            first, places = torch.ones_like(rows[:1, None]), table + 1
        else:  # requests one behind the other, that of padding the last, each with a bin for -1
            owner = torch.searchsorted(starts[1:].contiguous(), rows, right=True)
            bins = (requests + 1) * (width + 1) + 1
            first = owner[:, None] * (width + 1) + 1
            each = torch.arange(requests, device=table.device)[:, None]
            places = each * (width + 1) + 1 + columns
        seen = batch.visible[(starts[1:] - 1).clamp_min(0)] * (starts[1:] > starts[:-1])
        own = columns < (seen[:, None] + PAGE_TOKENS - 1) // PAGE_TOKENS
        return cls(
            rows,
            first,
            torch.where(own, places, bins - 1).long(),  # beyond it a table may hold anything
            torch.where(own, columns * _SPREAD % MAX_PAGES, -1 - columns),
            bins,
            as_slots,
        )

    def order(self, selected: torch.Tensor) -> torch.Tensor:
        """``page_order`` for the rows and pages of the batch, one of whose layers selected this.

        Args:
            selected: ``[T, k]`` int32 as of :class:`~.contract.Select`.

        Returns:
            ``[B, W]`` int32, in every row a permutation: pages by how many tokens of the sample
            were selected from them, the most first; those that no row sees at the end.
        """
        bins = (selected[self.rows] // PAGE_TOKENS + self.first).flatten()
        counts = bins.new_zeros(self.bins)
        counts.scatter_add_(0, bins, bins.new_ones(()).expand_as(bins))
        key = self.ranks.add(counts[self.places], alpha=MAX_PAGES)
        return key.argsort(descending=True).int()
