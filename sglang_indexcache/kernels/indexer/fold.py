"""A folded indexer for kernels: its query as heads that indexer kernels score, and a product.

The folded query ``q' = sum_h a_h w_h q_h`` ranks keys by ``q' . k`` (``sglang_indexcache.fold``).
Indexer kernels score ``sum_h w_h relu(q_h . k)``, and ``relu(x) - relu(-x) = x``: a head and its
negative, weighted 1 and -1, multiply without a ReLU. So every kernel that selects for heads selects
for a folded query, and one that takes few heads does less for it. e4m3 has four significant bits;
a second pair of heads holds what the first rounds away.

:func:`product` scores the same heads by one matrix product instead. It has the signature of
DeepGEMM's ``fp8_mqa_logits``, in whose place SGLang can call it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_indexcache.kernels.contract import INDEX_DIM, INDEXER_HEADS
from sglang_indexcache.kernels.indexer.quantization import E4M3_MAX

FOLDED_HEADS = INDEXER_HEADS[0]
"""The fewest heads that our kernels take. Four hold a folded query, the others are zero."""
REST = 16.0
"""Factor on what rounding leaves: at most a sixteenth of a value, so that it fits e4m3 again."""
BLOCK_ROWS, BLOCK_KEYS = 128, 128
ROW_ALIGNMENT = 4
"""Float32 logits of a row begin at a multiple of so many: SGLang's top-k loads four at once."""

INTERPRETED = triton.knobs.runtime.interpret
"""Whether Triton runs kernels on a CPU; where it does not, torch does their work there."""

KeysAndScales = tuple[torch.Tensor, torch.Tensor]


def folded_heads(
    q: torch.Tensor, weights: torch.Tensor, slopes: torch.Tensor, heads: int = FOLDED_HEADS
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fold the query of each row, and return it as heads of an indexer.

    Args:
        q: ``[T, H, 128]`` float8_e4m3fn, contiguous, H a power of two.
        weights: ``[T, H]`` float32, contiguous.
        slopes: ``[H]`` float32, one a head.
        heads: how many to return, 4 or more.

    Returns:
        ``[T, heads, 128]`` float8_e4m3fn and ``[T, heads]`` float32 weights. Their score is the
        folded query's product with a key, up to a positive factor of the row; each component of
        the query is right to 2^-8 of itself, or to 2^-17 of the row's largest.
    """
    if q.device.type == "cpu" and not INTERPRETED:
        return _folded_by_torch(q, weights, slopes, heads)
    rows = len(q)
    made = torch.empty(rows, heads, INDEX_DIM, dtype=torch.uint8, device=q.device)
    signs = torch.empty(rows, heads, dtype=torch.float32, device=q.device)
    if rows:
        shape = q.shape[1], heads, INDEX_DIM
        _fold[(rows,)](q, weights, slopes, made.view(q.dtype), signs, E4M3_MAX, REST, *shape)
    return made.view(q.dtype), signs


def _folded_by_torch(
    q: torch.Tensor, weights: torch.Tensor, slopes: torch.Tensor, heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    query = torch.einsum("thd,th->td", q.float(), weights * slopes)
    query *= E4M3_MAX / query.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    high = query.clamp(-E4M3_MAX, E4M3_MAX).to(q.dtype).float()
    low = ((query - high) * REST).to(q.dtype).float()
    made = torch.zeros(len(q), heads, INDEX_DIM)
    made[:, :4] = torch.stack([high, -high, low, -low], dim=1)
    signs = torch.zeros(len(q), heads)
    signs[:, :4] = torch.tensor([1.0, -1.0, 1 / REST, -1 / REST])
    return made.to(q.dtype), signs


@triton.jit
def _rounded(values):  # type: ignore[no-untyped-def]
    """Round to the nearest normal number of e4m3, and to zero below; interpreters differ there."""
    bits = values.to(tl.int32, bitcast=True)
    nearest = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(nearest) < 2.0**-6, 0.0, nearest).to(tl.float8e4nv)


@triton.jit  # type: ignore[untyped-decorator]
def _fold(  # type: ignore[no-untyped-def]
    q,
    weights,
    slopes,
    made,
    signs,
    largest,
    rest,
    in_heads: tl.constexpr,
    out_heads: tl.constexpr,
    width: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head, column = tl.arange(0, in_heads), tl.arange(0, width)
    values = tl.load(q + (row * in_heads + head[:, None]) * width + column[None, :])
    gates = tl.load(weights + row * in_heads + head) * tl.load(slopes + head)
    query = tl.sum(values.to(tl.float32) * gates[:, None], axis=0)
    # A row of zeros stays one; else the largest component is the largest of e4m3.
    query = query * (largest / tl.maximum(tl.max(tl.abs(query), axis=0), 1e-30))
    query = tl.clamp(query, -largest, largest)
    high = _rounded(query)
    low = _rounded((query - high.to(tl.float32)) * rest)
    begin = made + row * out_heads * width + column
    tl.store(begin, high)
    tl.store(begin + width, (-high.to(tl.float32)).to(tl.float8e4nv))
    tl.store(begin + 2 * width, low)
    tl.store(begin + 3 * width, (-low.to(tl.float32)).to(tl.float8e4nv))
    zero = tl.zeros([width], tl.float32).to(tl.float8e4nv)
    for more in tl.static_range(4, out_heads):
        tl.store(begin + more * width, zero)
    which = tl.arange(0, out_heads)
    size = tl.where(which < 2, 1.0, 1.0 / rest)
    sign = tl.where(which % 2 == 0, size, -size)
    tl.store(signs + row * out_heads + which, tl.where(which < 4, sign, 0.0))


def product(
    q: torch.Tensor,
    keys: KeysAndScales,
    weights: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    clean_logits: bool = False,
) -> torch.Tensor:
    """Score the heads of :func:`folded_heads` by one product of float16, added in float32.

    Args:
        q: ``[T, heads, 128]`` float8_e4m3fn.
        keys: ``[S, 128]`` float8_e4m3fn, contiguous, and their ``[S]`` float32 scales.
        weights: of :func:`folded_heads`; known, so not read.
        starts: ``[T]`` int32, the first key of each row.
        ends: ``[T]`` int32, behind the last; the keys between are scored.
        clean_logits: DeepGEMM's; must be False.

    Returns:
        ``[T, S]`` float32, rows a multiple of 4 apart. What a row does not see holds anything.

    Raises:
        ValueError: ``clean_logits``.
    """
    if clean_logits:
        raise ValueError("the folded product leaves logits that no row sees as they are")
    del weights
    values, scales = keys
    if q.device.type == "cpu" and not INTERPRETED:
        query = q[:, 0].float() + q[:, 2].float() / REST
        return query @ values.float().T * scales
    rows, count = len(q), len(values)
    stride = -(-count // ROW_ALIGNMENT) * ROW_ALIGNMENT
    logits = torch.empty(rows, stride, dtype=torch.float32, device=q.device)
    if rows and count:
        # Row blocks change fastest: those that run together read the same keys.
        grid = (triton.cdiv(rows, BLOCK_ROWS), triton.cdiv(count, BLOCK_KEYS))
        _product[grid](
            *(q, values, scales, starts, ends, logits),
            *(rows, count, q.stride(0), stride, 1.0 / REST),
            *(BLOCK_ROWS, BLOCK_KEYS, INDEX_DIM),
            num_warps=8,
        )
    return logits[:, :count]


@triton.jit  # type: ignore[untyped-decorator]
def _product(  # type: ignore[no-untyped-def]
    q,
    keys,
    scales,
    starts,
    ends,
    logits,
    rows,
    count,
    q_stride,
    stride,
    rest,
    block_rows: tl.constexpr,
    block_keys: tl.constexpr,
    width: tl.constexpr,
):
    row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    first_key = tl.program_id(1) * block_keys
    key = first_key + tl.arange(0, block_keys)
    column = tl.arange(0, width)
    is_row, is_key = row < rows, key < count
    start = tl.min(tl.load(starts + row, mask=is_row, other=2147483647))
    end = tl.max(tl.load(ends + row, mask=is_row, other=0))
    if (first_key < end) & (first_key + block_keys > start):
        places = row.to(tl.int64)[:, None] * q_stride + column[None, :]
        high = tl.load(q + places, mask=is_row[:, None], other=0.0)
        low = tl.load(q + places + 2 * width, mask=is_row[:, None], other=0.0)
        query = high.to(tl.float32) + low.to(tl.float32) * rest
        values = tl.load(
            keys + key.to(tl.int64)[None, :] * width + column[:, None],
            mask=is_key[None, :],
            other=0.0,
        )
        scores = tl.dot(query.to(tl.float16), values.to(tl.float16))
        scores *= tl.load(scales + key, mask=is_key, other=0.0)[None, :]
        tl.store(
            logits + row.to(tl.int64)[:, None] * stride + key[None, :],
            scores,
            mask=is_row[:, None] & is_key[None, :],
        )
