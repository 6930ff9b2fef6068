"""Sparse MLA in Triton, from Ampere to Blackwell: any number of heads, bfloat16 and FP8 rows.

One program attends with up to 32 heads of one query over a part of its list: gather rows, scores,
online softmax, weighted sum. A second kernel combines the parts of a list, if there are several.
"""

import torch
import triton
import triton.language as tl

from sglang_indexcache.kernels.checks import check_sparse_mla, output
from sglang_indexcache.kernels.contract import (
    FP8_GROUP,
    FP8_ROW_BYTES,
    LATENT_DIM,
    ROPE_DIM,
    VALUE_DIM,
    Kept,
)

BLOCK_ROWS = 32
"""Latent rows gathered at a time; with the queries they fit Ada's 99 KB of shared memory."""
MAX_BLOCK_HEADS = 32
"""The sums of 64 heads would not fit the registers of 8 warps beside the rows."""
NUM_WARPS = 8
MAX_SPLITS = 16

_VALUE, _ROPE = tl.constexpr(VALUE_DIM), tl.constexpr(ROPE_DIM)
_GROUPS = tl.constexpr(VALUE_DIM // FP8_GROUP)
_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)


def sparse_mla(
    q: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
    *,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    kept: Kept | None = None,
    splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:class:`~sglang_indexcache.kernels.contract.SparseMLA`, a list in ``splits`` parts."""
    del kept  # every program reads its own row's list
    check_sparse_mla(q, cache, slots, sinks)
    rows, heads, _ = q.shape
    out = output("sparse_mla", out, (rows, heads, VALUE_DIM), q.dtype, q.device)
    lse = output("sparse_mla", lse, (rows, heads), torch.float32, q.device)
    if rows == 0:
        return out, lse
    # A product has at least 16 rows, and a power of two: 20 heads are padded to 32, not to 64.
    block_heads = min(max(triton.next_power_of_2(heads), 16), MAX_BLOCK_HEADS)
    head_blocks = triton.cdiv(heads, block_heads)
    if splits is None:
        splits = _splits(rows * head_blocks, slots.shape[1], q.device)
    values, rope, scales, row_stride = _views(cache)
    if splits == 1:
        part_out, part_lse = out, lse
    else:
        part_out = torch.empty(splits, *out.shape, device=q.device)
        part_lse = torch.empty(splits, *lse.shape, device=q.device)
    _attend[(rows, head_blocks, splits)](
        q,
        values,
        rope,
        scales,
        slots,
        sinks,
        part_out,
        part_lse,
        scale,
        rows,
        heads,
        slots.shape[1],
        row_stride,
        SPLITS=splits,
        FP8=cache.dtype == torch.uint8,
        SINKS=sinks is not None,
        BLOCK_HEADS=block_heads,
        BLOCK_ROWS=BLOCK_ROWS,
        INTERPRETED=q.device.type != "cuda",
        num_warps=NUM_WARPS,
        num_stages=1,
    )
    if splits > 1:
        _combine[(rows, heads)](
            part_out,
            part_lse,
            sinks,
            out,
            lse,
            rows,
            heads,
            SPLITS=splits,
            SINKS=sinks is not None,
            INTERPRETED=q.device.type != "cuda",
        )
    return out, lse


def _splits(programs: int, listed: int, device: torch.device) -> int:
    """Parts of a list: two programs for every multiprocessor, at least two blocks of rows each."""
    if device.type != "cuda":
        return 1
    # Of shapes and card only, not of lengths: runs repeat bit by bit, and a graph can capture it.
    busy = 2 * torch.cuda.get_device_properties(device).multi_processor_count
    useful = max(1, listed // (2 * BLOCK_ROWS))
    wanted = max(1, min(busy // programs, useful, MAX_SPLITS))
    return 1 << (wanted.bit_length() - 1)


def _views(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Latent, rotary and scales of a cache, each from its first row on, and bytes of a row."""
    if cache.dtype == torch.uint8:
        rope = cache.view(torch.bfloat16)[:, -ROPE_DIM:]
        scales = cache.view(torch.float32)[:, VALUE_DIM // 4 :]
        return cache, rope, scales, FP8_ROW_BYTES
    return cache, cache[:, VALUE_DIM:], cache, 2 * LATENT_DIM


@triton.jit
def _e4m3(values):
    """E4m3 bytes as float32."""
    wide = values.to(tl.uint16)
    # float16 with e4m3's bits is the value times 2^-8, exactly; 2^8 undoes it in float32.
    half = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return half.to(tl.float32) * 256.0


@triton.jit
def _bfloat16(values, INTERPRETED: tl.constexpr):
    """Round float32 to the nearest bfloat16, ready to be multiplied.

    The interpreter truncates, and multiplies bfloat16 as if they were integers. For it the result
    is a float32 with a bfloat16's value, which gives the same products.
    """
    if INTERPRETED:
        bits = values.to(tl.uint32, bitcast=True)
        # To the nearest, ties to even: half an ulp less one, plus one if the last kept bit is 1.
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return bits.to(tl.float32, bitcast=True)
    return values.to(tl.bfloat16)


@triton.jit
def _attend(
    q,
    values,
    rope,
    scales,
    slots,
    sinks,
    out,
    lse,
    scale,
    num_rows,
    num_heads,
    listed,
    row_stride,
    SPLITS: tl.constexpr,
    FP8: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    split = tl.program_id(2)
    is_head = heads < num_heads
    value_dims = tl.arange(0, _VALUE)
    rope_dims = tl.arange(0, _ROPE)
    steps = tl.arange(0, BLOCK_ROWS)
    chosen = slots + row * listed

    at = (row * num_heads + heads) * (_VALUE + _ROPE)
    query = tl.load(q + at[:, None] + value_dims[None, :], mask=is_head[:, None], other=0.0)
    turned = tl.load(
        q + at[:, None] + _VALUE + rope_dims[None, :], mask=is_head[:, None], other=0.0
    )
    if INTERPRETED:
        query = query.to(tl.float32)
        turned = turned.to(tl.float32)

    # What stands behind the last slot is not read.
    count = 0
    for start in range(0, listed, BLOCK_ROWS):
        slot = tl.load(chosen + start + steps, mask=start + steps < listed, other=-1)
        count = tl.maximum(count, tl.max(tl.where(slot >= 0, start + steps + 1, 0), 0))
    # Whole blocks of what this query really lists, so that parts of short lists stay even.
    part = tl.cdiv(tl.cdiv(count, BLOCK_ROWS), SPLITS) * BLOCK_ROWS

    peak = tl.full((BLOCK_HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_HEADS,), tl.float32)
    sums = tl.zeros((BLOCK_HEADS, _VALUE), tl.float32)
    for start in range(split * part, tl.minimum((split + 1) * part, count), BLOCK_ROWS):
        # Rows that are not there are zeros: 0 x NaN from an unlisted row would be NaN.
        slot = tl.load(chosen + start + steps, mask=start + steps < count, other=-1).to(tl.int64)
        present = slot >= 0
        if FP8:
            stored = tl.load(
                values + slot[:, None] * row_stride + value_dims[None, :],
                mask=present[:, None],
                other=0,
            )
            unit = tl.load(
                scales + slot[:, None] * (row_stride // 4) + tl.arange(0, _GROUPS)[None, :],
                mask=present[:, None],
                other=0.0,
            )
            # One scale for 128 values. Rounded to bfloat16, because that is what an FP8 row means.
            grouped = tl.reshape(_e4m3(stored), (BLOCK_ROWS, _GROUPS, _VALUE // _GROUPS))
            latent = tl.reshape(grouped * unit[:, :, None], (BLOCK_ROWS, _VALUE))
            latent = _bfloat16(latent, INTERPRETED)
        else:
            latent = tl.load(
                values + slot[:, None] * (row_stride // 2) + value_dims[None, :],
                mask=present[:, None],
                other=0.0,
            )
            if INTERPRETED:
                latent = latent.to(tl.float32)
        rotary = tl.load(
            rope + slot[:, None] * (row_stride // 2) + rope_dims[None, :],
            mask=present[:, None],
            other=0.0,
        )
        if INTERPRETED:
            rotary = rotary.to(tl.float32)
        # Rows were gathered for the second product, [rows, 512]; the first wants them transposed:
        # a view of shared memory and no second gather.
        scores = tl.dot(query, tl.trans(latent))
        scores = tl.dot(turned, tl.trans(rotary), scores)
        # Base 2: exp2 is an instruction, exp is exp2 and a multiplication.
        scores = tl.where(present[None, :], scores * (scale * _LOG2E), float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        # While there is no row, ``higher`` is -inf too, and everything before it shrinks to 0.
        shift = tl.where(higher > float("-inf"), higher, 0.0)
        shrink = tl.exp2(peak - shift)
        weight = tl.exp2(scores - shift[:, None])
        total = total * shrink + tl.sum(weight, 1)
        sums = tl.dot(_bfloat16(weight, INTERPRETED), latent, sums * shrink[:, None])
        peak = higher

    some = tl.where(total > 0.0, total, 1.0)
    log_total = tl.where(total > 0.0, peak * _LN2 + tl.log(some), float("-inf"))
    result = sums / some[:, None]
    # A sink joins once, after the parts are combined, and never the LSE.
    if SINKS and SPLITS == 1:
        sink = tl.load(sinks + heads, mask=is_head, other=float("-inf"))
        result = result * _beside_sink(log_total, sink)[:, None]
    place = (split * num_rows + row) * num_heads + heads
    tl.store(lse + place, log_total, mask=is_head)
    address = out + place[:, None] * _VALUE + value_dims[None, :]
    if SPLITS == 1:
        result = _bfloat16(result, INTERPRETED)
    tl.store(address, result.to(out.dtype.element_ty), mask=is_head[:, None])


@triton.jit
def _beside_sink(lse, sink):
    """``exp(lse) / (exp(lse) + exp(sink))``, also for infinite sinks and empty rows."""
    some = lse > float("-inf")
    return tl.where(some, 1.0 / (1.0 + tl.exp(sink - tl.where(some, lse, 0.0))), 0.0)


@triton.jit
def _combine(
    part_out,
    part_lse,
    sinks,
    out,
    lse,
    num_rows,
    num_heads,
    SPLITS: tl.constexpr,
    SINKS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    place = row * num_heads + head
    dims = tl.arange(0, _VALUE)
    # All parts at once, in one order: whoever finished first does not show in the bits.
    parts = place + tl.arange(0, SPLITS).to(tl.int64) * num_rows * num_heads
    logs = tl.load(part_lse + parts)
    peak = tl.max(logs, 0)
    shares = tl.exp(logs - tl.where(peak > float("-inf"), peak, 0.0))
    total = tl.sum(shares, 0)
    some = tl.where(total > 0.0, total, 1.0)
    log_total = tl.where(total > 0.0, peak + tl.log(some), float("-inf"))
    values = tl.load(part_out + parts[:, None] * _VALUE + dims[None, :])
    result = tl.sum(values * shares[:, None], 0) / some
    if SINKS:
        result = result * _beside_sink(log_total, tl.load(sinks + head))
    tl.store(lse + place, log_total)
    result = _bfloat16(result, INTERPRETED).to(out.dtype.element_ty)
    tl.store(out + place * _VALUE + dims, result)
