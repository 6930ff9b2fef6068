"""Score and select on a CPU, in blocks, so that memory follows a budget instead of T x L.

The cost is two matrix products per block: ``[rows * heads, D] x [D, keys]`` in the keys' dtype
(bfloat16 runs on the machine's AMX or AVX-512 units) and the weighted head sum in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch

from sglang_indexcache.kernels.contract import PADDING
from sglang_indexcache.serving.row_split import RowShare

KEY_BLOCK = 1024
"""Keys scored at a time; with ROW_BLOCK it keeps one block's scores inside the cache."""
ROW_BLOCK = 32
LOGITS_BYTES = 128 << 20
"""Upper bound for the float32 logits of one block of rows."""

GatherKeys = Callable[[torch.Tensor], torch.Tensor]
"""Function ``slots [N] -> keys [N, D]`` that reads the index-K pool, in the dtype to compute in."""


@dataclass(frozen=True)
class HostBatch:
    """Several requests, with query rows laid end to end and keys in a pool, all on the host.

    Unlike the contract's ``IndexerBatch`` it does not fix how keys are stored, and its lengths are
    Python integers, so that rows that need no work can be skipped.

    Attributes:
        query_lens: number of rows of each request, which are its last tokens: all tokens in a first
            prefill, the newest chunk in a chunked prefill, one in decode; may be 0.
        key_lens: number of tokens of each request in the pool, queries included.
        slots: ``[B, >= max(key_lens)]`` physical slots; row ``b`` is valid up to ``key_lens[b]``.
    """

    query_lens: tuple[int, ...]
    key_lens: tuple[int, ...]
    slots: torch.Tensor

    @property
    def num_rows(self) -> int:
        """Query rows in all, T."""
        return sum(self.query_lens)

    @cached_property
    def request_of_row(self) -> torch.Tensor:
        """Request of each query row, ``[T]`` int64."""
        lens = torch.tensor(self.query_lens, dtype=torch.int64)
        return torch.arange(len(self.query_lens)).repeat_interleave(lens)

    @cached_property
    def visible(self) -> torch.Tensor:
        """Number of tokens of its request that each query row may attend to, ``[T]`` int64."""
        spans = [
            torch.arange(keys - queries + 1, keys + 1)
            for queries, keys in zip(self.query_lens, self.key_lens, strict=True)
        ]
        return torch.cat(spans) if spans else torch.empty(0, dtype=torch.int64)

    def share(self, share: RowShare) -> HostBatch:
        """Return a rank's share of the rows as a batch of its own."""
        return HostBatch(share.query_lens, share.key_lens, self.slots[share.requests])

    def physical_slots(self, positions: torch.Tensor) -> torch.Tensor:
        """Pool slots, int32, of request-local ``positions`` ``[>= T, k]``; -1 stays -1.

        Rows beyond T belong to no request: dp_attention pads batches to a common size.
        """
        result = torch.full_like(positions, PADDING, dtype=torch.int32)
        places = positions[: self.num_rows].long()
        first = self.request_of_row * self.slots.shape[1]
        slots = self.slots.flatten()[places.clamp_min(0) + first[:, None]].to(torch.int32)
        result[: self.num_rows] = slots.masked_fill_(places < 0, PADDING)
        return result


def every_visible(batch: HostBatch, rows: int, topk: int) -> torch.Tensor:
    """Select every token of rows that see at most k tokens, which needs no logits.

    The result is ``[rows, topk]`` int32, as :func:`select_topk` returns. A row that sees more than
    k tokens gets the first k, and rows beyond ``batch.num_rows`` select nothing.
    """
    result = torch.full((rows, topk), PADDING, dtype=torch.int32)
    columns = torch.arange(topk, dtype=torch.int32)
    visible = batch.visible[:, None]
    result[: batch.num_rows] = torch.where(columns < visible, columns, PADDING)
    return result


def select_topk(
    q: torch.Tensor,
    weights: torch.Tensor,
    gather_keys: GatherKeys,
    batch: HostBatch,
    topk: int,
) -> torch.Tensor:
    """Select the top-k visible positions of every query row of a paged batch.

    Args:
        q: ``[T, H, D]`` index queries, in the dtype that ``gather_keys`` returns.
        weights: ``[T, H]`` float32, gates times the softmax scale.

    Returns:
        ``[T, topk]`` int32 positions within each row's own request, ascending, -1 padded.
    """
    result = every_visible(batch, q.shape[0], topk)
    starts = [0, *accumulate(batch.query_lens)]
    longer = [b for b, keys in enumerate(batch.key_lens) if keys > topk]
    decoding = [b for b in longer if batch.query_lens[b] == 1]
    for group in _decode_groups(batch, decoding, q.shape[1]):
        rows = torch.tensor([starts[b] for b in group])
        logits = _decode_logits(q[rows], weights[rows], gather_keys, batch, group)
        result[rows] = topk_overwriting(logits, batch.visible[rows], topk)
    for b in longer:
        queries, total, end = batch.query_lens[b], batch.key_lens[b], starts[b + 1]
        if queries < 2:
            continue
        keys = gather_keys(batch.slots[b, :total])
        block = max(1, min(ROW_BLOCK, LOGITS_BYTES // (total * 4)))
        scores = _ScoreBlock(block, q, keys)
        first = max(0, topk - (total - queries))  # earlier rows see at most k tokens
        for low in range(starts[b] + first, end, block):
            high = min(low + block, end)
            logits = scores.logits(q[low:high], weights[low:high], keys, total - (end - high))
            result[low:high] = topk_overwriting(logits, batch.visible[low:high], topk)
    return result


def _decode_groups(batch: HostBatch, requests: list[int], heads: int) -> Iterator[list[int]]:
    """Group requests of similar length, so that padding to the longest at most doubles the work."""
    remaining = sorted(requests, key=lambda b: batch.key_lens[b], reverse=True)
    while remaining:
        longest = batch.key_lens[remaining[0]]
        room = max(1, LOGITS_BYTES // (longest * heads * 4))
        group = [b for b in remaining[:room] if 2 * batch.key_lens[b] >= longest]
        yield group
        remaining = remaining[len(group) :]


def _decode_logits(
    q: torch.Tensor,
    weights: torch.Tensor,
    gather_keys: GatherKeys,
    batch: HostBatch,
    requests: list[int],
) -> torch.Tensor:
    """Return the logits of requests with one query row each, ``[R, max(visible)]``."""
    longest = max(batch.key_lens[b] for b in requests)
    slots = batch.slots[requests, :longest]
    keys = gather_keys(slots.reshape(-1)).view(len(requests), longest, -1)
    per_head = torch.bmm(q, keys.transpose(1, 2)).float().relu_()
    return torch.bmm(weights.unsqueeze(1), per_head).squeeze(1)


class _ScoreBlock:
    """Scratch memory of one block of rows, reused so that no block pays for fresh pages."""

    def __init__(self, rows: int, q: torch.Tensor, keys: torch.Tensor) -> None:
        _, heads, _ = q.shape
        width = min(KEY_BLOCK, keys.shape[0])
        self._products = torch.empty(rows * heads * width, dtype=keys.dtype)
        self._scores = torch.empty(rows * heads * width, dtype=torch.float32)
        self._logits = torch.empty(rows * keys.shape[0], dtype=torch.float32)

    def logits(
        self, q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, visible: int
    ) -> torch.Tensor:
        """Return ``[R, visible]`` logits for ``R`` rows, which see at most ``visible`` tokens."""
        rows, heads, dim = q.shape
        flat = q.reshape(rows * heads, dim)
        gates = weights.unsqueeze(1)
        logits = self._logits[: rows * visible].view(rows, visible)
        for low in range(0, visible, KEY_BLOCK):
            high = min(low + KEY_BLOCK, visible)
            size = rows * heads * (high - low)
            products = self._products[:size].view(rows * heads, high - low)
            torch.mm(flat, keys[low:high].T, out=products)
            scores = self._scores[:size].view(rows, heads, high - low)
            scores.copy_(products.view_as(scores))
            scores.relu_()
            logits[:, low:high] = torch.bmm(gates, scores).squeeze(1)
        return logits


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
