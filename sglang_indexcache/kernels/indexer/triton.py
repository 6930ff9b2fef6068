"""The lightning indexer in Triton, from Ampere to Blackwell.

One program scores a tile of queries of one request against several blocks of its keys, read
straight from the pages. Keys are the rows of the product and ``queries x heads`` its columns, so
that the sum over the heads stays within few threads. Where the matrix unit knows e4m3 (compute
capability 8.9 and up) it multiplies the stored bytes; before, both sides are widened to float16,
which holds every e4m3 value times 2^-8 exactly.

The heads are summed in the order of Triton's reduction, which depends on the number of heads only.

Selection is two passes over a bounded scratch: logits of as many rows as fit
:data:`SCRATCH_BYTES`, then their top-k, until the rows are done.
"""

import torch
import triton
import triton.language as tl

from sglang_indexcache.kernels.checks import check_indexer, check_topk
from sglang_indexcache.kernels.contract import INDEX_DIM, PAGE_BYTES, PAGE_TOKENS
from sglang_indexcache.kernels.topk.triton import topk_of_requests

SCRATCH_BYTES = 256 << 20
TILE_COLUMNS = 128
"""Queries x heads of one tile."""
BLOCK_KEYS = 128
MAX_SPLITS = 64
"""Programs that share the keys of one tile of queries."""

_PAGE, _PAGE_BYTES, _DIM = (
    tl.constexpr(PAGE_TOKENS),
    tl.constexpr(PAGE_BYTES),
    tl.constexpr(INDEX_DIM),
)


def indexer_logits_prefill(
    q: torch.Tensor,
    weights: torch.Tensor,
    pages: torch.Tensor,
    block_table: torch.Tensor,
    query_starts: torch.Tensor,
    visible: torch.Tensor,
    width: int,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """:class:`~sglang_indexcache.kernels.contract.IndexerLogitsPrefill`."""
    check_indexer("indexer_logits_prefill", q, weights, pages, block_table, visible, query_starts)
    rows, heads = weights.shape
    if out is None:
        out = torch.empty(rows, width, device=q.device)
    if len(block_table) and rows:
        tile = TILE_COLUMNS // heads
        tiles = _tiles(query_starts, rows, tile)
        _score(q, weights, pages, block_table, tiles, visible, width, out, tile)
    return out


def indexer_logits_decode(
    q: torch.Tensor,
    weights: torch.Tensor,
    pages: torch.Tensor,
    block_table: torch.Tensor,
    visible: torch.Tensor,
    width: int,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """:class:`~sglang_indexcache.kernels.contract.IndexerLogitsDecode`."""
    check_indexer("indexer_logits_decode", q, weights, pages, block_table, visible)
    batch, next_n, heads = weights.shape
    if out is None:
        out = torch.empty(batch, next_n, width, device=q.device)
    requests = torch.arange(batch, dtype=torch.int32, device=q.device)
    tiles = requests, requests * next_n, (requests + 1) * next_n
    tile = max(triton.next_power_of_2(next_n), 16 // heads)  # a product has at least 16 columns
    flat = out.view(batch * next_n, width)
    _score(q, weights, pages, block_table, tiles, visible, width, flat, tile)
    return out


def indexer_select_prefill(
    q: torch.Tensor,
    weights: torch.Tensor,
    pages: torch.Tensor,
    block_table: torch.Tensor,
    query_starts: torch.Tensor,
    visible: torch.Tensor,
    topk: int,
    *,
    as_slots: bool = False,
    out: torch.Tensor | None = None,
    scratch_bytes: int = SCRATCH_BYTES,
) -> torch.Tensor:
    """:class:`~sglang_indexcache.kernels.contract.IndexerSelectPrefill`.

    Args:
        scratch_bytes: memory for logits; below one row's it is one row's.
    """
    check_topk(topk, "indexer_select_prefill")
    rows, width = q.shape[0], block_table.shape[1] * PAGE_TOKENS
    if out is None:
        out = torch.empty(rows, topk, dtype=torch.int32, device=q.device)
    request_of_row, visible = _rows(query_starts, visible)
    at_once = max(1, min(rows, scratch_bytes // max(4 * width, 1)))
    scratch = torch.empty(at_once, width, device=q.device)
    for low in range(0, rows, at_once):
        part = slice(low, min(low + at_once, rows))
        logits = scratch[: part.stop - low]
        indexer_logits_prefill(
            q[part],
            weights[part],
            pages,
            block_table,
            (query_starts - low).clamp(0, part.stop - low),
            visible[part],
            width,
            out=logits,
        )
        topk_of_requests(
            logits,
            visible[part],
            topk,
            block_table=block_table if as_slots else None,
            request_of_row=request_of_row[part],
            out=out[part],
        )
    return out


def indexer_select_decode(
    q: torch.Tensor,
    weights: torch.Tensor,
    pages: torch.Tensor,
    block_table: torch.Tensor,
    visible: torch.Tensor,
    topk: int,
    *,
    as_slots: bool = False,
    out: torch.Tensor | None = None,
    scratch_bytes: int = SCRATCH_BYTES,
) -> torch.Tensor:
    """:class:`~sglang_indexcache.kernels.contract.IndexerSelectDecode`.

    Args:
        scratch_bytes: memory for logits; below one request's it is one request's.
    """
    check_topk(topk, "indexer_select_decode")
    batch, next_n = visible.shape
    width = block_table.shape[1] * PAGE_TOKENS
    if out is None:
        out = torch.empty(batch, next_n, topk, dtype=torch.int32, device=q.device)
    at_once = max(1, min(batch, scratch_bytes // max(4 * next_n * width, 1)))
    scratch = torch.empty(at_once, next_n, width, device=q.device)
    request_of_row = torch.arange(batch * next_n, dtype=torch.int32, device=q.device) // next_n
    for low in range(0, batch, at_once):
        part = slice(low, min(low + at_once, batch))
        count = part.stop - low
        logits = scratch[:count]
        table = block_table[part]
        indexer_logits_decode(
            q[part], weights[part], pages, table, visible[part], width, out=logits
        )
        topk_of_requests(
            logits.view(count * next_n, width),
            visible[part].flatten(),
            topk,
            block_table=table if as_slots else None,
            request_of_row=request_of_row,
            out=out[part].view(count * next_n, topk),
        )
    return out


def _tiles(
    query_starts: torch.Tensor, rows: int, tile: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Request, first row and end of the request's rows for every tile of queries, ``[N]`` int32.

    N is what the host knows to be enough. A tile too many belongs to the last request and starts
    at its end: it has no rows.
    """
    starts, ends = query_starts[:-1], query_starts[1:]
    requests = len(starts)
    last_tiles = torch.cumsum((ends - starts + tile - 1) // tile, 0, dtype=torch.int32)
    numbers = torch.arange(rows // tile + requests, dtype=torch.int32, device=starts.device)
    owner = torch.searchsorted(last_tiles, numbers, right=True).clamp_max_(requests - 1)
    begin = last_tiles - (ends - starts + tile - 1) // tile
    first = torch.minimum(starts[owner] + (numbers - begin[owner]) * tile, ends[owner])
    return owner.to(torch.int32), first.to(torch.int32), ends[owner]


def _rows(query_starts: torch.Tensor, visible: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Request of every row, and what it sees: nothing for the padding behind the last request."""
    numbers = torch.arange(len(visible), dtype=torch.int32, device=visible.device)
    owner = torch.searchsorted(query_starts[1:].contiguous(), numbers, right=True)
    requests = len(query_starts) - 1
    inside = owner < requests
    return owner.clamp_max_(max(requests - 1, 0)).to(torch.int32), visible * inside


def _score(
    q: torch.Tensor,
    weights: torch.Tensor,
    pages: torch.Tensor,
    block_table: torch.Tensor,
    tiles: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    visible: torch.Tensor,
    width: int,
    out: torch.Tensor,
    tile: int,
) -> None:
    """Launch the scoring of all tiles; ``out`` is ``[rows, width]``."""
    heads, count = weights.shape[-1], len(tiles[0])
    splits = min(triton.cdiv(width, BLOCK_KEYS), MAX_SPLITS)
    if count == 0 or splits == 0:
        return
    _logits[(count, splits)](
        q.view(torch.uint8),
        weights,
        pages,
        pages.view(torch.float32),
        block_table,
        *tiles,
        visible,
        out,
        block_table.stride(0),
        out.stride(0),
        HEADS=heads,
        TILE=tile,
        BLOCK=BLOCK_KEYS,
        SPLITS=splits,
        FP8_UNIT=multiplies_e4m3(q.device),
        num_warps=8,
        num_stages=2,
    )


def multiplies_e4m3(device: torch.device) -> bool:
    """Whether the device's matrix unit takes e4m3 (Ada, Hopper, Blackwell)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


@triton.jit
def _widen(values):
    """E4m3 bytes as float16, times 2^-8: the exponent field keeps its bits, not its bias."""
    wide = values.to(tl.uint16)
    return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def _logits(
    q,
    weights,
    pages,
    page_scales,
    block_table,
    tile_request,
    tile_start,
    tile_end,
    visible,
    out,
    table_stride,
    out_stride,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    FP8_UNIT: tl.constexpr,
):
    tile = tl.program_id(0)
    start = tl.load(tile_start + tile)
    end = tl.load(tile_end + tile)
    table = block_table + tl.load(tile_request + tile).to(tl.int64) * table_stride
    rows = start + tl.arange(0, TILE)
    limits = tl.load(visible + rows, mask=rows < end, other=0)
    longest = tl.max(limits, 0)

    columns = tl.arange(0, TILE * HEADS)
    inside = columns // HEADS < end - start
    dims = tl.arange(0, _DIM)
    flat = start.to(tl.int64) * HEADS + columns
    queries = tl.load(q + flat[None, :] * _DIM + dims[:, None], mask=inside[None, :], other=0)
    gates = tl.load(weights + flat, mask=inside, other=0.0)

    for block in range(tl.program_id(1), tl.cdiv(longest, BLOCK), SPLITS):
        tokens = block * BLOCK + tl.arange(0, BLOCK)
        known = tokens < longest
        page = tl.load(table + tokens // _PAGE, mask=known, other=0).to(tl.int64)
        offset = tokens % _PAGE
        at = page * _PAGE_BYTES + offset * _DIM
        keys = tl.load(pages + at[:, None] + dims[None, :], mask=known[:, None], other=0)
        scale_at = page * (_PAGE_BYTES // 4) + _PAGE * _DIM // 4 + offset
        scales = tl.load(page_scales + scale_at, mask=known, other=0.0)
        if FP8_UNIT:
            dots = tl.dot(
                keys.to(tl.float8e4nv, bitcast=True), queries.to(tl.float8e4nv, bitcast=True)
            )
        else:
            dots = tl.dot(_widen(keys), _widen(queries)) * 65536.0
        weighted = tl.maximum(dots, 0.0) * gates[None, :]
        logits = tl.sum(tl.reshape(weighted, (BLOCK, TILE, HEADS)), 2) * scales[:, None]
        address = out + rows[None, :].to(tl.int64) * out_stride + tokens[:, None]
        tl.store(address, logits, mask=tokens[:, None] < limits[None, :])
