"""Our kernels in place of SGLang's (``--indexcache-kernels``), called with SGLang's data.

Selection replaces the two methods of SGLang's indexer that begin with quantised queries and end
with indices (``Indexer._get_topk_ragged`` in prefill, ``_get_topk_paged`` in decode and MTP).
Sparse attention replaces the backend's calls of FA3 and FlashMLA. Nothing here reads a tensor's
values, so all of it can be captured in a CUDA graph. One server on an H100 ran it, untimed.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.dsa.dsa_topk_backend import TopkTransformMethod
from sglang.srt.model_executor.forward_context import get_attn_backend

from sglang_indexcache.kernels.contract import (
    MAX_NEXT_N,
    PADDING,
    PAGE_BYTES,
    PAGE_TOKENS,
    IndexerBatch,
    Kept,
    Select,
    SparseMLA,
)
from sglang_indexcache.kernels.dispatch import Phase, named
from sglang_indexcache.kernels.routes import ENGINE, OURS, SECOND_TOPK, Operation, Routes
from sglang_indexcache.serving.cuda.second_topk import SecondTopk, takes_second_topk
from sglang_indexcache.serving.hooks import around
from sglang_indexcache.serving.plan import Route

if TYPE_CHECKING:
    from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer
    from sglang.srt.layers.attention.dsa.dsa_indexer_metadata import DSAIndexerMetadata
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineKernels:
    """Kernels of one backend by operation; None stands for SGLang's own.

    Attributes:
        measured: routes that choose a kernel for each call, by the operation's name; an operation
            that is missing here has one kernel for all calls.
        taken: counts of the kernels that these routes chose, with the reasons.
    """

    select_prefill: Select | None = None
    select_decode: Select | None = None
    sparse_mla_prefill: SparseMLA | None = None
    sparse_mla_decode: SparseMLA | None = None
    measured: dict[str, Routes] = field(default_factory=dict)
    taken: Counter[str] = field(default_factory=Counter)

    @classmethod
    def load(cls, routes: tuple[Route, ...], taken: Counter[str] | None = None) -> EngineKernels:
        """Import (for CUDA: compile and load) the chosen kernels, which the launcher has logged.

        Raises:
            KernelError: a kernel cannot be built or imported.
        """
        functions: dict[str, Any] = {
            f"{route.op}_{route.phase}": named(route.implementation).load(route.op)
            for route in routes
            if route.implementation
        }
        tables = {f"{route.op}-{route.phase}": route.measured for route in routes}
        measured = {name: table for name, table in tables.items() if table}
        return cls(**functions, measured=measured, taken=Counter() if taken is None else taken)

    def choose(self, operation: Operation, rows: int, tokens: tuple[int, int] | None = None) -> str:
        """Return whose kernels run a call with ``rows`` rows; only facts on the host decide."""
        ours = getattr(self, operation.name.replace("-", "_"))
        if operation.name not in self.measured:
            return ENGINE if ours is None else OURS
        choice = self.measured[operation.name].choose(operation, rows, tokens)
        self.taken[f"{operation.name}: {choice.name}, {choice.why}"] += 1
        return choice.name

    def attention(
        self, mode: ForwardMode, q: torch.Tensor, cache: torch.Tensor
    ) -> SparseMLA | None:
        """Return our sparse attention for a call, or None for SGLang's; MTP counts as decode."""
        phase, rows = "decode" if is_decode(mode) else "prefill", "bfloat16"
        if cache.element_size() == 1:
            rows = "fp8"
        operation = Operation(f"sparse_mla-{phase}", q.shape[1], rows)
        if self.choose(operation, len(q)) == ENGINE:
            return None
        return self.sparse_mla_decode if phase == "decode" else self.sparse_mla_prefill

    @property
    def selects(self) -> bool:
        """Whether any selection may use other kernels than SGLang's default."""
        names = ("select_prefill", "select_decode")
        has_ours = any(getattr(self, name) is not None for name in names)
        return has_ours or any(name.replace("_", "-") in self.measured for name in names)


def is_decode(mode: ForwardMode) -> bool:
    """Return whether SGLang uses its decode kernels (``forward_cuda``, ``forward_extend``)."""
    return mode.is_decode_or_idle() or mode.is_target_verify() or mode.is_draft_extend_v2()


# -- selection ---------------------------------------------------------------------------------

_INDEXER = "sglang.srt.layers.attention.dsa.dsa_indexer"


def install() -> None:
    """Wrap the two methods of SGLang's indexer, for our kernels and for the row split.

    Safe to call again.

    Raises:
        UnsupportedEngineError: SGLang could not wrap them.
    """
    around(f"{_INDEXER}.Indexer._get_topk_ragged", ragged)
    around(f"{_INDEXER}.Indexer._get_topk_paged", _paged)


def ragged(
    original: Callable[..., torch.Tensor],
    indexer: Indexer,
    enable_dual_stream: bool,
    forward_batch: ForwardBatch,
    layer_id: int,
    q_fp8: torch.Tensor,
    weights: torch.Tensor,
    metadata: DSAIndexerMetadata,
    topk_result: torch.Tensor | None = None,
) -> torch.Tensor:
    """Replace ``Indexer._get_topk_ragged``: use our kernel, and only for this rank's share of rows.

    A graph reads ``topk_result`` at its address, so it is written in place; padding rows keep their
    content.
    """
    kernels, topk = current(), indexer.index_topk

    def select_rows(
        q: torch.Tensor,
        gates: torch.Tensor,
        part: DSAIndexerMetadata,
        result: torch.Tensor | None = None,
    ) -> torch.Tensor:
        name, kernel = _prefill_kernels(kernels, q, part), kernels.select_prefill
        if kernel is None or name != OURS or _is_unknown(part, "prefill"):
            if name == SECOND_TOPK:
                part = replace(part, topk_backend=SecondTopk(part.topk_backend))
            call = (enable_dual_stream, forward_batch, layer_id, q, gates, part, result)
            return original(indexer, *call)
        return select(kernel, "prefill", q, gates, _pages(indexer, layer_id), part, topk, result)

    forwards = split_forwards()
    if forwards is None:
        return select_rows(q_fp8, weights, metadata, topk_result)
    lists: torch.Tensor = forwards.select(q_fp8, weights, metadata, topk, topk_result, select_rows)
    return lists


def _paged(
    original: Callable[..., torch.Tensor],
    indexer: Indexer,
    forward_batch: ForwardBatch,
    layer_id: int,
    q_fp8: torch.Tensor,
    weights: torch.Tensor,
    metadata: DSAIndexerMetadata,
) -> torch.Tensor:
    """Replace ``Indexer._get_topk_paged``."""
    kernels, kernel = current(), current().select_decode
    name = _decode_kernels(kernels, q_fp8, metadata)
    if kernel is None or name != OURS or _is_unknown(metadata, "decode"):
        return original(indexer, forward_batch, layer_id, q_fp8, weights, metadata)
    pages = _pages(indexer, layer_id)
    return select(kernel, "decode", q_fp8, weights, pages, metadata, indexer.index_topk)


def _prefill_kernels(
    kernels: EngineKernels, q_fp8: torch.Tensor, metadata: DSAIndexerMetadata
) -> str:
    """Return whose kernels select in a prefill; records have timed only PAGED lists."""
    if "select-prefill" not in kernels.measured:
        return OURS
    lengths = metadata.get_indexer_seq_len_cpu().tolist()
    if not lengths or not takes_second_topk(metadata):
        return ENGINE
    operation = Operation("select-prefill", q_fp8.shape[1])
    return kernels.choose(operation, _rows(metadata, "prefill"), (min(lengths), max(lengths)))


def _decode_kernels(
    kernels: EngineKernels, q_fp8: torch.Tensor, metadata: DSAIndexerMetadata
) -> str:
    """Return whose kernels select in a decode step, by its requests and the rows per request."""
    if "select-decode" not in kernels.measured:
        return OURS
    requests = metadata.get_seqlens_int32().shape[0]
    verified = _rows(metadata, "decode") // max(requests, 1)
    return kernels.choose(Operation("select-decode", q_fp8.shape[1], verified=verified), requests)


def select(
    kernel: Select,
    phase: Phase,
    q_fp8: torch.Tensor,
    weights: torch.Tensor,
    pages: torch.Tensor,
    metadata: DSAIndexerMetadata,
    topk: int,
    result: torch.Tensor | None = None,
) -> torch.Tensor:
    """Select with our kernel as ``Indexer._get_topk_ragged`` (prefill) or ``_get_topk_paged`` do.

    Args:
        q_fp8: ``[T, H, 128]`` float8_e4m3fn; T includes padding rows of dp_attention or of a graph.
        weights: ``[>= rows, H, 1]`` float32, with the scales of q and of the softmax.
        metadata: SGLang's metadata; its page table has a row for each request, in decode for each
            query row.
        result: ``[T, topk]`` int32 to write to; padding rows keep their content. A piecewise graph
            reads it at this address.

    Returns:
        ``[T, topk]`` int32: pool slots, offsets into the flattened keys of the batch (RAGGED), or
        positions in the request if SGLang maps them itself; ascending, padded with -1.
    """
    rows = _rows(metadata, phase)
    if result is None:
        result = empty_lists(q_fp8, topk)
    if rows == 0:
        return result
    batch = IndexerBatch(
        q_fp8[:rows].contiguous(),
        weights[:rows].squeeze(-1).contiguous(),
        pages,
        _page_table(metadata, phase, rows),
        metadata.get_seqlens_expanded(),
        metadata.attn_metadata.cu_seqlens_q if phase == "prefill" else None,
    )
    method = None if metadata.force_unfused_topk else metadata.topk_transform_method
    chosen = result[:rows]
    kernel(batch, topk, as_slots=method == TopkTransformMethod.PAGED, out=chosen)
    if method == TopkTransformMethod.RAGGED:
        offset = metadata.attn_metadata.topk_indices_offset[:rows, None]
        chosen.copy_(torch.where(chosen == PADDING, PADDING, chosen + offset))
    return result


def _page_table(metadata: DSAIndexerMetadata, phase: Phase, rows: int) -> torch.Tensor:
    """Return SGLang's page table with one row for each request.

    In decode SGLang repeats a request's row for each of its MTP rows. Our kernel takes it once and
    reads the request's keys once for four rows; if there are more than eight rows, each counts as a
    request.
    """
    table: torch.Tensor = metadata.get_page_table_64()
    if phase == "prefill":
        return table
    verified, rest = divmod(rows, metadata.get_seqlens_int32().shape[0])
    return table if rest or verified > MAX_NEXT_N else table[::verified]


def empty_lists(q_fp8: torch.Tensor, topk: int) -> torch.Tensor:
    """Return ``[T, topk]`` int32 lists for ``[T, H, D]`` queries, filled with padding."""
    return torch.full((len(q_fp8), topk), PADDING, dtype=torch.int32, device=q_fp8.device)


def mismatch(metadata: DSAIndexerMetadata, phase: Phase) -> str | None:
    """Return why SGLang's metadata has another form than expected, or None; read only shapes."""
    attention = metadata.attn_metadata
    tables, lengths = len(attention.real_page_table), len(attention.dsa_seqlens_expanded)
    rows = _rows(metadata, phase)
    expected = len(attention.cu_seqlens_q) - 1 if phase == "prefill" else rows
    if attention.indexer_logical_page_table is not None:
        return "index keys and latents have page tables of their own"
    if attention.page_size != PAGE_TOKENS:
        return f"pages have {attention.page_size} tokens"
    if lengths != rows:
        return f"{rows} query rows have {lengths} lengths"
    if tables != expected:
        return f"the page table has {tables} rows, not {expected}"
    return None


def _is_unknown(metadata: DSAIndexerMetadata, phase: Phase) -> bool:
    """Return whether SGLang must select itself, and log that once."""
    problem = mismatch(metadata, phase)
    if problem:
        _say_once(f"IndexCache kernels: SGLang's indexer selects in {phase}, because {problem}")
    return problem is not None


@functools.cache
def _say_once(message: str) -> None:
    logger.warning(message)


def _rows(metadata: DSAIndexerMetadata, phase: Phase) -> int:
    """Count the query rows without padding."""
    if phase == "prefill":
        return len(metadata.get_indexer_kvcache_range()[0])
    return sum(metadata.get_dsa_extend_len_cpu())


def _pages(indexer: Indexer, layer_id: int) -> torch.Tensor:
    """Return a layer's index keys; wait for HiCache if it is still loading them."""
    pages: torch.Tensor = indexer._get_index_k_read_buffer(
        get_attn_backend().token_to_kv_pool, layer_id
    )
    return pages.view(-1, PAGE_BYTES)


def current_backend() -> Any:
    """Return the attention backend of the forward in progress."""
    return unwrapped(get_attn_backend())


def unwrapped(backend: Any) -> Any:
    """Return the backend of DSA layers, which hybrid models wrap in another backend."""
    return getattr(backend, "full_attn_backend", backend)


def current() -> EngineKernels:
    """Return the current forward's kernels; SGLang's if another backend runs it (drafts)."""
    kernels = getattr(current_backend(), "kernels", None)
    return kernels if isinstance(kernels, EngineKernels) else EngineKernels()


def split_forwards() -> Any:
    """Return the current forward's :class:`.row_split.SplitForwards`; None for drafts."""
    return getattr(current_backend(), "split_forwards", None)


# -- sparse attention --------------------------------------------------------------------------


class KeptLists:
    """Cache of data derived from the last selection's slots, for the layers that share them."""

    def __init__(self) -> None:
        # A weak reference, so that the engine can free a selection when its forward ends.
        self._slots: Callable[[], torch.Tensor | None] = lambda: None
        self._selection = -1
        self._kept: Kept = {}

    def of(self, slots: torch.Tensor, selection: int) -> Kept:
        """Return the data derived from ``slots``; empty if the slots changed since the last call.

        SGLang passes one tensor to the layers that share a selection, and may later write another
        selection to the same tensor. ``selection`` distinguishes them: it is the number of times
        that indices were selected or taken over so far.
        """
        if slots is not self._slots() or selection != self._selection:
            self._slots, self._selection, self._kept = weakref.ref(slots), selection, {}
        return self._kept


def attend(
    kernel: SparseMLA,
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None = None,
    kept: Kept | None = None,
    lengths: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute sparse MLA over the same rows that SGLang's kernels would read.

    Args:
        q: ``[T, Hq, 576]`` bfloat16.
        kv_cache: ``[N, 1, 576]`` bfloat16, from the pool or gathered for this batch, or the pool's
            ``[N, 1, 656]`` FP8 rows in any one-byte dtype.
        slots: ``[T, k]`` int32 rows of ``kv_cache``, padded with -1.
        lengths: int32, the number of slots in each row that are not padding. As in SGLang, it is
            ignored if it has another number of rows (dp_attention pads).

    Returns:
        ``[T, Hq, 512]`` bfloat16.
    """
    if lengths is not None and len(lengths) != len(q):
        lengths = None
    if kv_cache.element_size() == 1:
        kv_cache = kv_cache.view(torch.uint8)
    out, _ = kernel(
        q.contiguous(),
        kv_cache.reshape(-1, kv_cache.shape[-1]),
        slots.contiguous(),
        scale,
        sinks=None if sinks is None else sinks.float(),
        kept=kept,
        lengths=lengths,
    )
    return out
