"""The recent window in Triton: one program a row, nothing read on the host, safe in a CUDA graph.

A program writes its list's entries together, then of the last tokens those that the list lacks, by
comparing each with all k entries, then padding to the end: k x w comparisons a row.
"""

import torch
import triton
import triton.language as tl

from sglang_indexcache.kernels.contract import PADDING
from sglang_indexcache.recent import Addresses

_PADDING = tl.constexpr(PADDING)
_COMPARED = 1 << 14
"""Entries times recent tokens that a program compares at a time, in its registers."""


def widen(
    lists: torch.Tensor,
    visible: torch.Tensor,
    windows: torch.Tensor | int,
    width: int,
    addresses: Addresses,
    multiple: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`sglang_indexcache.recent.widen`."""
    rows, topk = lists.shape
    total = topk + width
    total += -total % multiple
    out = torch.empty(rows, total, dtype=torch.int32, device=lists.device)
    counts = torch.empty(rows, dtype=torch.int32, device=lists.device)
    table, owners, offsets = addresses.table, addresses.owners, addresses.offsets
    each = isinstance(windows, torch.Tensor)
    if rows:
        _widen[(rows,)](
            lists,
            visible,
            windows,
            table,
            owners,
            offsets,
            out,
            counts,
            lists.stride(0),
            0 if table is None else table.stride(0),
            topk,
            total,
            EACH=each,
            AS_SLOTS=table is not None,
            AS_OFFSETS=offsets is not None,
            **tile(width),
            num_warps=4,
        )
    return out, counts


def tile(width: int) -> dict[str, int]:
    """Return the constants of a kernel for windows of up to ``width``."""
    power = triton.next_power_of_2(width)
    return {"WIDTH": power, "BLOCK": max(16, min(256, _COMPARED // power))}


@triton.jit
def _widen(
    lists,
    visible,
    windows,
    table,
    owners,
    offsets,
    out,
    counts,
    lists_stride,
    table_stride,
    topk,
    total,
    EACH: tl.constexpr,
    AS_SLOTS: tl.constexpr,
    AS_OFFSETS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)  # 64 bits: row * stride passes 2^31
    list_row = lists + row * lists_stride
    out_row = out + row * total
    sees = tl.load(visible + row).to(tl.int32)
    window = windows
    if EACH:
        window = tl.load(windows + row)
    back = tl.arange(0, WIDTH)
    positions = sees - 1 - back
    wanted = (back < window) & (positions >= 0)
    near = positions
    if AS_SLOTS:
        table_row = table + tl.load(owners + row).to(tl.int64) * table_stride
        near = tl.load(table_row + positions, mask=wanted, other=_PADDING)
    if AS_OFFSETS:
        near = positions + tl.load(offsets + row).to(tl.int32)
    held = tl.zeros([WIDTH], dtype=tl.int32)
    columns = tl.arange(0, BLOCK)
    count = 0
    for start in range(0, topk, BLOCK):
        entries = tl.load(list_row + start + columns, mask=start + columns < topk, other=_PADDING)
        is_one = (entries != _PADDING).to(tl.int32)
        tl.store(out_row + count + tl.cumsum(is_one, 0) - 1, entries, mask=is_one == 1)
        count += tl.sum(is_one, 0)
        same = (near[:, None] == entries[None, :]).to(tl.int32)
        held = tl.maximum(held, tl.max(same, 1))
    lacking = (wanted & (held == 0)).to(tl.int32)
    tl.store(out_row + count + tl.cumsum(lacking, 0) - 1, near, mask=lacking == 1)
    count += tl.sum(lacking, 0)
    tl.store(counts + row, count)
    for start in range(0, total, BLOCK):
        behind = (start + columns >= count) & (start + columns < total)
        tl.store(out_row + start + columns, _PADDING, mask=behind)
