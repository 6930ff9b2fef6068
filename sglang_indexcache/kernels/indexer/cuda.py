"""The lightning indexer on Hopper (csrc/indexer).

Selection takes one of two ways. *Fused*: one launch streams the logits through a gate and no matrix
is made. *In two launches*: logits to scratch memory, then top-k; its first launch splits one row's
keys over many SMs, so it is for batches of few rows: every decode, and prefills too short to give
each SM a tile.
"""

import torch

from sglang_indexcache.kernels.checks import check_indexer, check_topk
from sglang_indexcache.kernels.contract import PAGE_TOKENS, WORKSPACE_BYTES
from sglang_indexcache.kernels.cuda import (
    library,
    multiprocessors,
    output,
    require_aligned,
    require_hopper,
)

LIST_CAPACITY = 8192
"""``kListCapacity`` of csrc/indexer/gate.h."""


def select_rows(heads: int) -> int:
    """Query rows of one tile of the fused kernel (``select_rows`` of csrc/indexer/run.h)."""
    return 8 if heads <= 32 else 4


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
    """:class:`sglang_indexcache.kernels.contract.IndexerLogitsPrefill`."""
    op = "indexer_logits_prefill"
    _check(op, q, weights, pages, block_table, visible, query_starts)
    out = output(op, out, (len(q), width), torch.float32, q.device, strided_rows=True)
    _logits(q, weights, pages, block_table, query_starts, 1, visible, out)
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
    """:class:`sglang_indexcache.kernels.contract.IndexerLogitsDecode`."""
    op = "indexer_logits_decode"
    _check(op, q, weights, pages, block_table, visible)
    batch, next_n = visible.shape
    shape = (batch, next_n, width)
    out = output(op, out, shape, torch.float32, q.device, strided_rows=True)
    between = out.stride(0) if next_n == 1 else out.stride(1)  # rows of the matrix
    if batch <= 1 or out.stride(0) == next_n * between:
        rows = out.as_strided((batch * next_n, width), (between, 1))
        _logits_decode(q, weights, pages, block_table, visible, rows)
        return out
    for b in range(batch):  # rows of two requests lie further apart than those of one
        one = slice(b, b + 1)
        _logits_decode(q[one], weights[one], pages, block_table[one], visible[one], out[b])
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
) -> torch.Tensor:
    """:class:`sglang_indexcache.kernels.contract.IndexerSelectPrefill`."""
    op = "indexer_select_prefill"
    check_topk(topk, op)
    _check(op, q, weights, pages, block_table, visible, query_starts)
    rows, heads = q.shape[:2]
    out = output(op, out, (rows, topk), torch.int32, q.device)
    if rows == 0:
        return out
    tiles = -(-rows // select_rows(heads))
    width = block_table.shape[1] * PAGE_TOKENS
    sms = multiprocessors(q.device)
    if tiles < sms and rows * width * 4 <= WORKSPACE_BYTES:
        logits = torch.empty(rows, width, dtype=torch.float32, device=q.device)
        _logits(q, weights, pages, block_table, query_starts, 1, visible, logits)
        table = block_table if as_slots else None
        library("topk").topk_of_requests(logits, visible, query_starts, 1, table, out)
    else:
        shape = (min(tiles, sms), select_rows(heads), LIST_CAPACITY)
        lists = torch.empty(shape, dtype=torch.int64, device=q.device)
        library("indexer").indexer_select(
            _bytes(q), weights, pages, block_table, query_starts, visible, as_slots, lists, out
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
) -> torch.Tensor:
    """:class:`sglang_indexcache.kernels.contract.IndexerSelectDecode`."""
    op = "indexer_select_decode"
    check_topk(topk, op)
    _check(op, q, weights, pages, block_table, visible)
    batch, next_n = visible.shape
    out = output(op, out, (batch, next_n, topk), torch.int32, q.device)
    width = block_table.shape[1] * PAGE_TOKENS
    at_once = max(1, WORKSPACE_BYTES // max(1, next_n * width * 4))
    logits = torch.empty(min(batch, at_once) * next_n, width, dtype=torch.float32, device=q.device)
    for first in range(0, batch, at_once):
        part = slice(first, first + at_once)
        table, seen = block_table[part], visible[part]
        scores = logits[: seen.numel()]
        _logits_decode(q[part], weights[part], pages, table, seen, scores)
        library("topk").topk_of_requests(
            scores,
            seen.flatten(),
            None,
            next_n,
            table if as_slots else None,
            out[part].flatten(0, 1),
        )
    return out


def _check(
    op: str,
    q: torch.Tensor,
    weights: torch.Tensor,
    pages: torch.Tensor,
    block_table: torch.Tensor,
    visible: torch.Tensor,
    query_starts: torch.Tensor | None = None,
) -> None:
    """Everything that the kernels need of their inputs, and of the device."""
    check_indexer(op, q, weights, pages, block_table, visible, query_starts)
    require_hopper(op, q.device)
    require_aligned(op, q=q, pages=pages)


def _logits_decode(
    q: torch.Tensor,
    weights: torch.Tensor,
    pages: torch.Tensor,
    block_table: torch.Tensor,
    visible: torch.Tensor,
    out: torch.Tensor,
) -> None:
    next_n = visible.shape[1]
    flat = q.flatten(0, 1), weights.flatten(0, 1)
    _logits(*flat, pages, block_table, None, next_n, visible.flatten(), out)


def _logits(
    q: torch.Tensor,
    weights: torch.Tensor,
    pages: torch.Tensor,
    block_table: torch.Tensor,
    query_starts: torch.Tensor | None,
    rows_per_request: int,
    visible: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Rows of ``out`` may be any stride apart."""
    if out.numel():
        library("indexer").indexer_logits(
            _bytes(q), weights, pages, block_table, query_starts, rows_per_request, visible, out
        )


def _bytes(q: torch.Tensor) -> torch.Tensor:
    """As uint8: not every DLPack exchange knows float8."""
    return q.view(torch.uint8)
