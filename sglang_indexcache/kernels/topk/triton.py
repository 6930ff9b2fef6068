"""Exact, deterministic top-k in Triton: one program a row, radix selection, ordered output.

Four passes over the row find the k-th largest value, a last one writes what is above it and the
first of what equals it. Counts are integers, so no order of execution shows.
"""

import torch
import triton
import triton.language as tl

from sglang_indexcache.kernels.checks import check_logits, output
from sglang_indexcache.kernels.contract import PADDING, PAGE_TOKENS

BLOCK = 2048
_PADDING = tl.constexpr(PADDING)
_PAGE = tl.constexpr(PAGE_TOKENS)


def topk(
    logits: torch.Tensor, visible: torch.Tensor, topk: int, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """:class:`~sglang_indexcache.kernels.contract.TopK`."""
    return topk_of_requests(logits, visible, topk, out=out)


def topk_of_requests(
    logits: torch.Tensor,
    visible: torch.Tensor,
    topk: int,
    *,
    block_table: torch.Tensor | None = None,
    request_of_row: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """:func:`topk`, positions mapped to physical slots where a ``block_table`` is given.

    It is ``[B, W]`` int32, and ``request_of_row`` ``[T]`` int32.
    """
    check_logits(logits, visible, topk)
    rows = logits.shape[0]
    out = output("topk", out, (rows, topk), torch.int32, logits.device)
    if rows:
        _select[(rows,)](
            logits,
            visible,
            block_table,
            request_of_row,
            out,
            logits.stride(0),
            0 if block_table is None else block_table.stride(0),
            topk,
            AS_SLOTS=block_table is not None,
            BLOCK=BLOCK,
            num_warps=8,
        )
    return out


@triton.jit
def _ordered(values):
    """Unsigned integers in the order of ``values``; both zeros give one number."""
    # -0.0 == 0.0, so both become +0.0 before the bits are looked at.
    bits = tl.where(values == 0.0, 0.0, values).to(tl.uint32, bitcast=True)
    # Negative floats descend as integers: flip all bits. Positive ones go above them: set the sign.
    return tl.where((bits >> 31) == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _as_output(positions, block_row, AS_SLOTS: tl.constexpr, mask):
    if AS_SLOTS:
        # Masked: the table of a row that selects nothing must not be followed.
        page = tl.load(block_row + positions // _PAGE, mask=mask, other=0)
        return page * _PAGE + positions % _PAGE
    return positions


@triton.jit
def _select(
    logits,
    visible,
    block_table,
    request_of_row,
    out,
    logits_stride,
    table_stride,
    topk,
    AS_SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)  # 64 bits: row * stride passes 2^31
    limit = tl.load(visible + row)
    out_row = out + row * topk
    logits_row = logits + row * logits_stride
    block_row = block_table
    if AS_SLOTS:
        block_row = block_table + tl.load(request_of_row + row).to(tl.int64) * table_stride
    columns = tl.arange(0, BLOCK)
    # Fewer tokens than k: all of them, without a look at the logits.
    if limit <= topk:
        for start in range(0, topk, BLOCK):
            positions = start + columns
            found = _as_output(positions, block_row, AS_SLOTS, positions < limit)
            found = tl.where(positions < limit, found, _PADDING)
            tl.store(out_row + positions, found, mask=positions < topk)
    else:
        threshold, ties = _kth_largest(logits_row, limit, topk, BLOCK)
        written = 0
        seen = 0
        for start in range(0, limit, BLOCK):
            positions = start + columns
            inside = positions < limit
            keys = _ordered(tl.load(logits_row + positions, mask=inside, other=0.0))
            equal = ((keys == threshold) & inside).to(tl.int32)
            # Ties go to the smaller position: of the values at the threshold the first are kept.
            first = seen + tl.cumsum(equal, 0) <= ties
            keep = inside & ((keys > threshold) | ((equal == 1) & first))
            # A prefix sum and no atomic: the output is ascending, and the same in every run.
            order = written + tl.cumsum(keep.to(tl.int32), 0) - 1
            found = _as_output(positions, block_row, AS_SLOTS, keep)
            tl.store(out_row + order, found, mask=keep)
            written += tl.sum(keep.to(tl.int32), 0)
            seen += tl.sum(equal, 0)


@triton.jit
def _kth_largest(logits_row, limit, topk, BLOCK: tl.constexpr):
    """The ordered bits of the k-th largest value, and how many of its equals are in the top-k."""
    bins = tl.arange(0, 256)
    columns = tl.arange(0, BLOCK)
    prefix = tl.full((), 0, tl.uint32)
    wanted = topk
    # A byte of the key at a time, from the top: four histograms of 256 instead of a sort.
    for shift in tl.static_range(24, -1, -8):
        counts = tl.zeros((256,), tl.int32)
        for start in range(0, limit, BLOCK):
            positions = start + columns
            inside = positions < limit
            keys = _ordered(tl.load(logits_row + positions, mask=inside, other=0.0))
            # Only keys that agree in the bytes found so far; at first a shift by 32, undefined.
            if shift < 24:
                inside = inside & ((keys >> (shift + 8)) == (prefix >> (shift + 8)))
            digits = ((keys >> shift) & 0xFF).to(tl.int32)
            counts += tl.histogram(digits, 256, mask=inside)
        # at_least[d] values have this digit or a larger one, so it falls with d: the last digit
        # with enough of them is the k-th's.
        at_least = tl.cumsum(counts, 0, reverse=True)
        found = tl.sum((at_least >= wanted).to(tl.int32), 0) - 1
        # What has a larger digit is in; the rest must come from this digit's values.
        wanted -= tl.sum(tl.where(bins > found, counts, 0), 0)
        prefix = prefix | (found.to(tl.uint32) << shift)
    return prefix, wanted
