"""Selection in two stages: a folded query picks candidates, the exact score ranks them.

:class:`SecondStage` selects as :class:`~sglang_indexcache.kernels.contract.Select` says, but of a
row that sees more than ``factor * topk`` tokens it looks at those alone whose folded score is best;
other rows are selected exactly. In steps, for a bounded number of rows at a time:

- folded logits over pages, one product of float16 added in float32 (as :func:`.fold.product`);
- the candidates: the best of each row, of equal scores the smaller positions, ascending;
- their exact logits: products of float16 added in float32, weighted and added over the heads in an
  order that Triton chooses for a number of heads. So a logit depends on its row and its key alone,
  and is within :func:`~sglang_indexcache.kernels.contract.logits_tolerance` of float64;
- the best of these, by the second kernel again.

Nothing is read back by the host, and every result is a function of its row: the same in each run,
on every rank, and in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sglang_indexcache.kernels.contract import (
    INDEX_DIM,
    PADDING,
    PAGE_BYTES,
    PAGE_TOKENS,
    WORKSPACE_BYTES,
    IndexerBatch,
)
from sglang_indexcache.kernels.indexer import fold

SAMPLE = 8192
"""Scores of a row that are held at once; of a longer row so many are a sample."""
BLOCK = 4096
"""Scores that are read at once in a pass over a row."""
BLOCK_PAGES = 4
"""Pages of keys that one query tile is multiplied by."""
FEWEST_HEADS = 16
"""The least that a matrix unit multiplies by."""


@dataclass(frozen=True)
class SecondStage:
    """A layer's selection among candidates of its folded score.

    Attributes:
        slopes: ``[H]`` float32, one a head.
        factor: how many times as many candidates as are selected.
    """

    slopes: torch.Tensor
    factor: int

    def __call__(
        self,
        batch: IndexerBatch,
        topk: int,
        *,
        as_slots: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """:class:`~sglang_indexcache.kernels.contract.Select`."""
        rows, device = len(batch.q), batch.q.device
        if out is None:
            out = torch.empty(rows, topk, dtype=torch.int32, device=device)
        each = batch.rows_per_request if batch.query_starts is None else 1
        block = max(each, WORKSPACE_BYTES // self._row_bytes(batch, topk) // each * each)
        for low in range(0, rows, block):
            high = min(low + block, rows)
            self._select(batch.part(low, high), topk, as_slots, out[low:high])
        return out

    def _row_bytes(self, batch: IndexerBatch, topk: int) -> int:
        """Return what a row takes: logits, a bracket, candidates and their logits, picks."""
        width = batch.block_table.shape[1] * PAGE_TOKENS
        folded = fold.FOLDED_HEADS * (INDEX_DIM + 4)
        return 4 * (width + SAMPLE + 2 * self.factor * topk) + folded + 40 * topk

    def _select(self, batch: IndexerBatch, topk: int, as_slots: bool, out: torch.Tensor) -> None:
        owner, visible = _owners(batch)
        table, (rows, heads, _) = batch.block_table, batch.q.shape
        width, most = table.shape[1] * PAGE_TOKENS, self.factor * topk
        keys = batch.pages.view(torch.float8_e4m3fn), batch.pages.view(torch.float32)

        query, _ = fold.folded_heads(batch.q, batch.weights, self.slopes)
        folded = torch.empty(rows, width, dtype=torch.float32, device=out.device)
        tile, warps = (16, 4) if batch.query_starts is None else (fold.BLOCK_ROWS, 8)
        _folded_logits[triton.cdiv(rows, tile), triton.cdiv(table.shape[1], BLOCK_PAGES)](
            *(query, *keys, table, owner, visible, folded, rows, query.stride(0)),
            *(table.stride(0), width, 1.0 / fold.REST, tile, BLOCK_PAGES),
            num_warps=warps,
        )
        candidates = largest(folded, visible, most)
        exact = torch.empty(rows, most, dtype=torch.float32, device=out.device)
        _exact_logits[rows, triton.cdiv(most, fold.BLOCK_KEYS)](
            *(batch.q, batch.weights, *keys, table, owner, visible, candidates, exact, topk),
            *(table.stride(0), most, heads, max(heads, FEWEST_HEADS), fold.BLOCK_KEYS),
        )
        chosen = largest(exact, visible.clamp(max=most), topk)
        picks = positions = candidates.gather(1, chosen.clamp_min(0).long())
        if as_slots:
            page = table[owner[:, None], positions.clamp_min(0) // PAGE_TOKENS]
            picks = page * PAGE_TOKENS + positions % PAGE_TOKENS
        out.copy_(torch.where(chosen < 0, PADDING, picks))


def _owners(batch: IndexerBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's request, and what it sees: nothing in rows that pad the batch (int32)."""
    row = torch.arange(len(batch.q), dtype=torch.int32, device=batch.q.device)
    if batch.query_starts is None:
        return row // batch.rows_per_request, batch.visible
    owner = torch.bucketize(row, batch.query_starts[1:], right=True, out_int32=True)
    last = len(batch.block_table) - 1
    return owner.clamp(max=last), batch.visible.masked_fill(owner > last, 0)


def largest(scores: torch.Tensor, visible: torch.Tensor, count: int) -> torch.Tensor:
    """Select for every row the ``count`` largest of the scores that it sees.

    Rows of more than :data:`SAMPLE` scores are read twice: a sample says between which two scores
    the last one lies, and how many are above is counted. Where the sample errs, or more than it
    holds lie there, the row is read 34 times.

    Args:
        scores: ``[T, S]`` float32, contiguous.
        visible: ``[T]`` int32, at most S.

    Returns:
        ``[T, count]`` int32 positions, ascending, of equal scores (-0 is 0) the smaller, padded
        with -1.
    """
    rows, width = scores.shape
    chosen = torch.empty(rows, count, dtype=torch.int32, device=scores.device)
    bracket = chosen
    if width > SAMPLE:
        bracket = torch.empty(rows, SAMPLE, dtype=torch.uint32, device=scores.device)
    if rows:
        _largest[(rows,)](
            *(scores, visible, chosen, bracket, width, count),
            *(min(SAMPLE, triton.next_power_of_2(width)), BLOCK, width > SAMPLE),
            num_warps=8,
        )
    return chosen


_BYTES, _TOKENS, _WIDTH = map(tl.constexpr, (PAGE_BYTES, PAGE_TOKENS, INDEX_DIM))


@triton.jit  # type: ignore[untyped-decorator]
def _folded_logits(  # type: ignore[no-untyped-def]
    q, keys, scales, table, owner, visible, logits, rows, q_stride, table_stride, stride, rest,
    block_rows: tl.constexpr, block_pages: tl.constexpr,
):  # fmt: skip
    start, local = tl.program_id(0).to(tl.int64) * block_rows, tl.arange(0, block_rows)
    row = start + local
    column, within = tl.arange(0, _WIDTH), tl.arange(0, _TOKENS)
    is_row, begin = row < rows, tl.program_id(1) * block_pages
    seen = tl.load(visible + row, mask=is_row, other=0)
    if begin * _TOKENS < tl.max(seen, axis=0):
        request = tl.load(owner + row, mask=is_row, other=-1)
        first = tl.min(tl.where(is_row, request, 2147483647), axis=0)
        # Offsets in 32 bits take half of the registers.
        places = q + start * q_stride + (local[:, None] * q_stride + column[None, :])
        high = tl.load(places, mask=is_row[:, None], other=0.0).to(tl.float32)
        low = tl.load(places + 2 * _WIDTH, mask=is_row[:, None], other=0.0).to(tl.float32)
        query = (high + low * rest).to(tl.float16)
        for each in range(first, tl.max(request, axis=0) + 1):
            mine = tl.where(request == each, seen, 0)
            pages = tl.cdiv(tl.max(mine, axis=0), _TOKENS)
            for number in range(begin, tl.minimum(begin + block_pages, pages)):
                page = tl.load(table + each * table_stride + number).to(tl.int64)
                values = tl.load(keys + page * _BYTES + within[None, :] * _WIDTH + column[:, None])
                own_scales = scales + page * (_BYTES // 4) + _TOKENS * (_WIDTH // 4)
                scores = tl.dot(query, values.to(tl.float16))
                scores *= tl.load(own_scales + within)[None, :]
                key = number * _TOKENS + within
                tl.store(
                    logits + start * stride + (local[:, None] * stride + key[None, :]),
                    scores,
                    mask=key[None, :] < mine[:, None],
                )


@triton.jit  # type: ignore[untyped-decorator]
def _exact_logits(  # type: ignore[no-untyped-def]
    q, weights, keys, scales, table, owner, visible, candidates, exact, topk, table_stride, count,
    heads, block_heads: tl.constexpr, block_keys: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block_keys + tl.arange(0, block_keys)
    seen = tl.load(visible + row)
    # A row that selects all it sees has nothing to rank.
    if (seen > topk) & (tl.program_id(1) * block_keys < seen):
        is_key = at < tl.minimum(seen, count)
        position = tl.load(candidates + row * count + at, mask=is_key, other=0)
        pages = table + tl.load(owner + row).to(tl.int64) * table_stride
        page = tl.load(pages + position // _TOKENS, mask=is_key, other=0).to(tl.int64)
        column, head = tl.arange(0, _WIDTH), tl.arange(0, block_heads)
        begin = page * _BYTES + (position % _TOKENS) * _WIDTH
        values = tl.load(keys + begin[:, None] + column[None, :], mask=is_key[:, None], other=0.0)
        is_head = head < heads
        queries = tl.load(
            q + row * heads * _WIDTH + head[None, :] * _WIDTH + column[:, None],
            mask=is_head[None, :],
            other=0.0,
        )
        weight = tl.load(weights + row * heads + head, mask=is_head, other=0.0)
        dots = tl.dot(values.to(tl.float16), queries.to(tl.float16))
        logits = tl.sum(tl.maximum(dots, 0.0) * weight[None, :], axis=1)
        scale = page * (_BYTES // 4) + _TOKENS * (_WIDTH // 4) + position % _TOKENS
        logits *= tl.load(scales + scale, mask=is_key, other=0.0)
        tl.store(exact + row * count + at, logits, mask=is_key)


@triton.jit
def _ordered(scores):  # type: ignore[no-untyped-def]
    """Return unsigned numbers in the order of the scores; -0 is 0, and none is below 1."""
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.uint32, bitcast=True)
    return tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _nth(keys, n):  # type: ignore[no-untyped-def]
    """Return the ``n``-th largest of ``keys``, bit by bit."""
    least = tl.full([], 0, tl.uint32)
    bit = tl.full([], 0x80000000, tl.uint32)
    for _ in range(32):
        tried = least | bit
        count = tl.sum((keys >= tried).to(tl.int32), axis=0)
        least = tl.where(count >= n, tried, least)
        bit = bit >> 1
    return least


@triton.jit  # type: ignore[untyped-decorator]
def _largest(  # type: ignore[no-untyped-def]
    scores, visible, chosen, bracket, stride, limit, sample: tl.constexpr, block: tl.constexpr,
    is_long: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(visible + row)
    values, picks = scores + row * stride, chosen + row * limit
    if count <= limit:
        for first in range(0, limit, block):
            at = first + tl.arange(0, block)
            tl.store(picks + at, tl.where(at < count, at, -1), mask=at < limit)
    else:
        # The last score that is taken, and how many equal ones are.
        least = tl.full([], 0, tl.uint32)
        above = 0
        few = tl.arange(0, sample)
        if count <= sample:
            keys = tl.load(values + few, mask=few < count, other=0.0)
            keys = tl.where(few < count, _ordered(keys), 0)
            least = _nth(keys, limit)
            above = tl.sum((keys > least).to(tl.int32), axis=0)
        elif is_long:
            # Steps of the sample vary, or a text that repeats itself would be sampled badly.
            step = count // sample
            keys = _ordered(tl.load(values + few * step + (few * 40503 & 0xFFFF) % step))
            share = sample * (limit / count)
            margin = 3.0 * tl.sqrt(share) + 4.0
            low = _nth(keys, tl.minimum(share + margin, sample).to(tl.int32))
            high = _nth(keys, tl.maximum(share - margin, 1.0).to(tl.int32))
            high = tl.where(share - margin < 1.0, 0xFFFFFFFF, high)
            within = 0
            held = bracket + row * sample
            for first in range(0, count, block):
                at = first + tl.arange(0, block)
                part = _ordered(tl.load(values + at, mask=at < count, other=0.0))
                mine = ((part >= low) & (part <= high) & (at < count)).to(tl.int32)
                place = within + tl.cumsum(mine, axis=0) - 1
                tl.store(held + place, part, mask=(mine > 0) & (place < sample))
                within += tl.sum(mine, axis=0)
                above += tl.sum(((part > high) & (at < count)).to(tl.int32), axis=0)
            tl.debug_barrier()  # what one thread has stored another reads
            if (above < limit) & (above + within >= limit) & (within <= sample):
                keys = tl.load(held + few, mask=few < within, other=0)
                least = _nth(keys, limit - above)
                above += tl.sum((keys > least).to(tl.int32), axis=0)
            else:
                bit = tl.full([], 0x80000000, tl.uint32)
                for _ in range(33):  # the last time for what is above
                    tried = tl.where(bit > 0, least | bit, least + 1)
                    above = 0
                    for first in range(0, count, block):
                        at = first + tl.arange(0, block)
                        part = _ordered(tl.load(values + at, mask=at < count, other=0.0))
                        above += tl.sum(((part >= tried) & (at < count)).to(tl.int32), axis=0)
                    least = tl.where((above >= limit) & (bit > 0), tried, least)
                    bit = bit >> 1
        ties = limit - above
        larger, equal = 0, 0
        for first in range(0, count, block):
            at = first + tl.arange(0, block)
            part = _ordered(tl.load(values + at, mask=at < count, other=0.0))
            is_above = (part > least) & (at < count)
            is_equal = (part == least) & (at < count)
            # Both counts in one sum: a block has fewer than 2^15 scores.
            both = tl.cumsum(is_above.to(tl.int32) + (is_equal.to(tl.int32) << 16), axis=0)
            tied = equal + (both >> 16)
            place = larger + (both & 0xFFFF) + tl.minimum(tied, ties) - 1
            tl.store(picks + place, at, mask=is_above | (is_equal & (tied <= ties)))
            larger += tl.sum(is_above.to(tl.int32), axis=0)
            equal += tl.sum(is_equal.to(tl.int32), axis=0)
