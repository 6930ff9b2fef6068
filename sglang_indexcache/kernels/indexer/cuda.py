"""The lightning indexer on Hopper (csrc/indexer), and its top-k alone (csrc/topk).

Selection has two forms. *Fused*: one launch streams the logits through a filter and stores no
matrix. *In two launches*: the first writes logits to scratch memory; the second, top-k, is launched
early and waits for them. The two launches split a row over several SMs, so they serve batches of
few rows: every decode, and prefills too short to give each SM a tile. The scratch memory limits the
rows at a time.
"""

import torch

from sglang_indexcache.kernels.build import constant, library
from sglang_indexcache.kernels.checks import (
    check_indexer,
    check_logits,
    check_topk,
    output,
    require_aligned,
)
from sglang_indexcache.kernels.contract import PAGE_TOKENS, WORKSPACE_BYTES, IndexerBatch
from sglang_indexcache.kernels.dispatch import multiprocessors

LIST_CAPACITY = constant("indexer/gate.h", "kListCapacity")


def select_rows(heads: int) -> int:
    """Return the rows in a tile of the fused kernel (``select_rows`` of csrc/indexer/run.h)."""
    return 8 if heads <= 32 else 4


def prepare() -> None:
    """Compile and load the libraries of the ops below."""
    library("indexer")
    library("topk")


def logits(batch: IndexerBatch, width: int, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """:class:`sglang_indexcache.kernels.contract.Logits`."""
    _check("logits", batch)
    q = batch.q
    out = output("logits", out, (len(q), width), torch.float32, q.device, strided_rows=True)
    _logits(batch, out)
    return out


def select(
    batch: IndexerBatch, topk: int, *, as_slots: bool = False, out: torch.Tensor | None = None
) -> torch.Tensor:
    """:class:`sglang_indexcache.kernels.contract.Select`."""
    check_topk(topk, "select")
    _check("select", batch)
    rows = len(batch.q)
    out = output("select", out, (rows, topk), torch.int32, batch.q.device)
    if rows == 0:
        return out
    if is_fused(batch):
        _fused(batch, as_slots, out)
    else:
        _in_parts(batch, batch.block_table.shape[1] * PAGE_TOKENS, as_slots, out)
    return out


def topk(
    logits: torch.Tensor, visible: torch.Tensor, topk: int, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """:class:`sglang_indexcache.kernels.contract.TopK`."""
    check_logits(logits, visible, topk)
    out = output("topk", out, (len(visible), topk), torch.int32, logits.device)
    if len(visible):
        library("topk").topk(logits, visible, out)
    return out


def is_fused(batch: IndexerBatch) -> bool:
    """Return whether ``select`` uses the fused kernel: one launch."""
    tiles, sms = _tiles_and_sms(batch)
    return batch.query_starts is not None and tiles >= sms


def _tiles_and_sms(batch: IndexerBatch) -> tuple[int, int]:
    rows, heads, _ = batch.q.shape
    return -(-rows // select_rows(heads)), multiprocessors(batch.q.device)


def _fused(batch: IndexerBatch, as_slots: bool, out: torch.Tensor) -> None:
    blocks = min(_tiles_and_sms(batch))
    shape = (blocks, select_rows(batch.q.shape[1]), LIST_CAPACITY)
    lists = torch.empty(shape, dtype=torch.int64, device=batch.q.device)
    # One counter per launch: a shared one would be incremented by launches on two streams.
    counter = torch.zeros(1, dtype=torch.int32, device=batch.q.device)
    library("indexer").indexer_select(
        _bytes(batch.q),
        batch.weights,
        batch.pages,
        batch.block_table,
        batch.query_starts,
        batch.visible,
        as_slots,
        lists,
        counter,
        out,
    )


def _in_parts(batch: IndexerBatch, width: int, as_slots: bool, out: torch.Tensor) -> None:
    """Select for as many rows at a time as the workspace holds; decode takes whole requests."""
    rows, each = len(out), _rows_per_request(batch)
    at_once = each * max(1, WORKSPACE_BYTES // max(1, each * width * 4))
    shape = (min(rows, at_once), width)
    scratch = torch.empty(shape, dtype=torch.float32, device=batch.q.device)
    for low in range(0, rows, at_once):
        high = min(low + at_once, rows)
        part, scores = batch.part(low, high), scratch[: high - low]
        _logits(part, scores)
        table = part.block_table if as_slots else None
        library("topk").topk_of_requests(
            scores, part.visible, part.query_starts, each, table, out[low:high]
        )


def _logits(batch: IndexerBatch, out: torch.Tensor) -> None:
    """Write logits into ``out``, whose rows may be any stride apart."""
    if out.numel():
        library("indexer").indexer_logits(
            _bytes(batch.q),
            batch.weights,
            batch.pages,
            batch.block_table,
            batch.query_starts,
            _rows_per_request(batch),
            batch.visible,
            out,
        )


def _check(op: str, batch: IndexerBatch) -> None:
    check_indexer(op, batch)
    require_aligned(op, q=batch.q)


def _rows_per_request(batch: IndexerBatch) -> int:
    """Return the rows of each request; with ``query_starts`` 1, a value that no kernel reads."""
    return batch.rows_per_request if batch.query_starts is None else 1


def _bytes(q: torch.Tensor) -> torch.Tensor:
    """View ``q`` as uint8, because not every DLPack exchange supports float8."""
    return q.view(torch.uint8)
