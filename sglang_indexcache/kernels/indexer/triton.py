"""The lightning indexer in Triton, from Ampere to Blackwell.

One program scores a tile of queries of one request against several blocks of its keys, read
straight from the pages. Selection is two passes over a bounded scratch: logits of as many rows as
fit, then their top-k, until the rows are done.
"""

import torch
import triton
import triton.language as tl

from sglang_indexcache.kernels.checks import check_indexer, check_topk, output
from sglang_indexcache.kernels.contract import INDEX_DIM, PAGE_BYTES, PAGE_TOKENS, IndexerBatch
from sglang_indexcache.kernels.topk.triton import topk_of_requests

SCRATCH_BYTES = 256 << 20
TILE_COLUMNS = 128
"""Queries x heads of one tile."""
BLOCK_KEYS = 128
MAX_SPLITS = 64
"""Programs that share the keys of one tile of queries."""

_PAGE, _DIM = tl.constexpr(PAGE_TOKENS), tl.constexpr(INDEX_DIM)
_PAGE_BYTES = tl.constexpr(PAGE_BYTES)


def logits(batch: IndexerBatch, width: int, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """:class:`~sglang_indexcache.kernels.contract.Logits`."""
    check_indexer("logits", batch)
    rows, heads, _ = batch.q.shape
    q = batch.q
    out = output("logits", out, (rows, width), torch.float32, q.device, strided_rows=True)
    splits = min(triton.cdiv(width, BLOCK_KEYS), MAX_SPLITS)
    if rows == 0 or splits == 0 or len(batch.block_table) == 0:
        return out
    tile, *tiles = _tiles(batch)
    _logits[(len(tiles[0]), splits)](
        batch.q.view(torch.uint8),
        batch.weights,
        batch.pages,
        batch.pages.view(torch.float32),
        batch.block_table,
        *tiles,
        batch.visible,
        out,
        batch.block_table.stride(0),
        out.stride(0),
        HEADS=heads,
        TILE=tile,
        BLOCK=BLOCK_KEYS,
        SPLITS=splits,
        FP8_UNIT=multiplies_e4m3(batch.q.device),
        num_warps=8,
        num_stages=2,
    )
    return out


def select(
    batch: IndexerBatch,
    topk: int,
    *,
    as_slots: bool = False,
    out: torch.Tensor | None = None,
    scratch_bytes: int = SCRATCH_BYTES,
) -> torch.Tensor:
    """:class:`~sglang_indexcache.kernels.contract.Select`, in scratch of at least one request's."""
    check_topk(topk, "select")
    check_indexer("select", batch)
    rows, width = len(batch.q), batch.block_table.shape[1] * PAGE_TOKENS
    out = output("select", out, (rows, topk), torch.int32, batch.q.device)
    step = batch.rows_per_request if batch.query_starts is None else 1
    at_once = step * max(1, scratch_bytes // max(4 * width * step, 1))
    scratch = torch.empty(min(rows, at_once), width, device=batch.q.device)
    for low in range(0, rows, at_once):
        high = min(low + at_once, rows)
        part = batch.part(low, high)
        owner, visible = _rows(part)
        topk_of_requests(
            logits(part, width, out=scratch[: high - low]),
            visible,
            topk,
            block_table=part.block_table if as_slots else None,
            request_of_row=owner,
            out=out[low:high],
        )
    return out


def _tiles(batch: IndexerBatch) -> tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries of a tile; request, first row and end of the request's rows of every tile.

    The last three are ``[N]`` int32, and N is what the host knows to be enough. A tile too many
    belongs to the last request and starts at its end: it has no rows.
    """
    heads, requests = batch.q.shape[1], len(batch.block_table)
    if batch.query_starts is None:  # a tile is a request, so that its keys are read once
        each = batch.rows_per_request
        owner = torch.arange(requests, dtype=torch.int32, device=batch.q.device)
        tile = max(triton.next_power_of_2(each), 16 // heads)  # a product has 16 columns or more
        return tile, owner, owner * each, (owner + 1) * each
    tile = TILE_COLUMNS // heads
    starts, ends = batch.query_starts[:-1], batch.query_starts[1:]
    tiles_of = (ends - starts + tile - 1) // tile
    last_tiles = torch.cumsum(tiles_of, 0, dtype=torch.int32)
    count = len(batch.q) // tile + requests
    numbers = torch.arange(count, dtype=torch.int32, device=starts.device)
    owner = torch.searchsorted(last_tiles, numbers, right=True).clamp_max_(requests - 1)
    begin = last_tiles - tiles_of
    first = torch.minimum(starts[owner] + (numbers - begin[owner]) * tile, ends[owner])
    return tile, owner.to(torch.int32), first.to(torch.int32), ends[owner]


def _rows(batch: IndexerBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Request of every row, and what it sees: nothing for the padding behind the last request."""
    numbers = torch.arange(len(batch.visible), dtype=torch.int32, device=batch.visible.device)
    if batch.query_starts is None:
        return numbers // batch.rows_per_request, batch.visible
    owner = torch.searchsorted(batch.query_starts[1:].contiguous(), numbers, right=True)
    requests = len(batch.block_table)
    inside = owner < requests
    return owner.clamp_max_(max(requests - 1, 0)).to(torch.int32), batch.visible * inside


def multiplies_e4m3(device: torch.device) -> bool:
    """Whether the device's matrix unit takes e4m3 (Ada, Hopper, Blackwell)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


@triton.jit
def _widen(values):
    """E4m3 bytes as float16, times 2^-8: the exponent field keeps its bits, not its bias."""
    # e4m3 is s.eeee.mmm, float16 s.eeeee.mmmmmmmmmm: the sign moves up 8 bits, the rest 7.
    # Biases of 7 and 15 make that the value times 2^-8, exactly, subnormals included.
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
    # Rows of the tile beyond the request see nothing, so nothing is stored for them.
    limits = tl.load(visible + rows, mask=rows < end, other=0)
    longest = tl.max(limits, 0)

    # Queries x heads are the columns of the product and keys its rows, so that the sum over the
    # heads stays within few threads.
    columns = tl.arange(0, TILE * HEADS)
    inside = columns // HEADS < end - start
    dims = tl.arange(0, _DIM)
    # 64 bits: T * H * 128 passes 2^31 at 262,144 rows of 64 heads.
    flat = start.to(tl.int64) * HEADS + columns
    # Already transposed, [128, queries x heads]: loaded once, used for every block of keys.
    queries = tl.load(q + flat[None, :] * _DIM + dims[:, None], mask=inside[None, :], other=0)
    gates = tl.load(weights + flat, mask=inside, other=0.0)

    # Every SPLITS-th block: the host does not know the lengths, and requests of any length balance.
    for block in range(tl.program_id(1), tl.cdiv(longest, BLOCK), SPLITS):
        tokens = block * BLOCK + tl.arange(0, BLOCK)
        # Entries of the page table beyond the request are not initialised.
        known = tokens < longest
        page = tl.load(table + tokens // _PAGE, mask=known, other=0).to(tl.int64)
        offset = tokens % _PAGE
        at = page * _PAGE_BYTES + offset * _DIM
        keys = tl.load(pages + at[:, None] + dims[None, :], mask=known[:, None], other=0)
        # The scales follow the 64 keys of a page; the pointer to them counts float32s.
        scale_at = page * (_PAGE_BYTES // 4) + _PAGE * _DIM // 4 + offset
        scales = tl.load(page_scales + scale_at, mask=known, other=0.0)
        if FP8_UNIT:
            dots = tl.dot(
                keys.to(tl.float8e4nv, bitcast=True), queries.to(tl.float8e4nv, bitcast=True)
            )
        else:
            # Before 8.9 no matrix unit takes e4m3. Both sides are 2^-8 of their value: times 2^16.
            dots = tl.dot(_widen(keys), _widen(queries)) * 65536.0
        weighted = tl.maximum(dots, 0.0) * gates[None, :]
        # Summed in the order of Triton's reduction, which depends on the number of heads only:
        # a row's logits are the same bits in any tile and any batch.
        logits = tl.sum(tl.reshape(weighted, (BLOCK, TILE, HEADS)), 2) * scales[:, None]
        address = out + rows[None, :].to(tl.int64) * out_stride + tokens[:, None]
        # Each row to its own length: what lies beyond may be another row's, or nobody's.
        tl.store(address, logits, mask=tokens[:, None] < limits[None, :])
