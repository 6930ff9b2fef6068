"""The kernels of others: those that SGLang 0.5.23 runs on Hopper, and more top-ks beside its own.

What is timed is what SGLang does in every layer:

* DeepGEMM's logits, in slices within a memory budget.
* The top-k. "sglang v2" is what SGLang runs in decode (``SGLANG_OPT_USE_TOPK_V2``); in prefill it
  runs ``sgl_kernel``'s legacy one, but with an FP8 cache and ``flashmla_sparse``. Both run here.
* FlashAttention 3, which SGLang runs in decode over a bfloat16 cache.
* FlashMLA. It takes 64 or 128 heads; SGLang allocates and fills a padded query in every call, so
  padding is inside the time. (For 20 heads only its ``flashmla_kv`` does that: ``flashmla_sparse``
  refuses them.)
* What SGLang offers instead for a prefill over a bfloat16 cache (``--dsa-prefill-backend``):
  ``triton_sparse_mla``, alone and with ``--dsa-triton-union``, and ``flashmla_sparse_q8``, which
  makes FP8 of query and cache in every call and computes with that.

Schedules and plans are made once a forward for all layers and are not timed. A package is imported
when it is first asked for. Whatever goes wrong then (not installed, built for another torch) is the
reason that is reported.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from sglang_indexcache.kernels.contract import PAGE_BYTES, PAGE_TOKENS, VALUE_DIM

if TYPE_CHECKING:
    from benchmarks.kernels.workloads import AttentionTensors, IndexerTensors, Workload

Call = Callable[[], Any]
TopK = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""From float32 logits, the tokens that each row sees and k: ``[rows, k]`` positions, or slots."""
SLICE_BYTES = 4 << 30
"""Logits held at once; SGLang's own budget on an 80 GB card is of this order."""
TOPKS = ("torch.topk", "flashinfer.top_k_ragged_transform", "sgl_kernel.fast_topk_v2", "sglang v2")
"""Selections from given logits; all but torch's compile, or follow a DeepGEMM that does."""
ENGINE_TOPK = TOPKS[-1]
"""What SGLang runs in decode unless told otherwise."""
LEGACY_TOPK = TOPKS[-2]
"""And in prefill."""
_SGLANG_TOPK = "sglang.kernels.ops.attention.dsv4.topk"
_OPS = "sglang.kernels.ops.attention"
_FLASH_MLA = f"{_OPS}.flash_mla_interface"
"""SGLang's, which takes Hopper's kernels; the package by itself takes Blackwell's."""
_FA3 = f"{_OPS}.flash_attention"
_TRITON_MLA = f"{_OPS}.dsa.triton_sparse_mla_prefill"
_Q8 = f"{_OPS}.sparse_mla_q8kv8_prefill_sm90"
TRITON_HEADS, TRITON_UNION = 32, (16, 32)
"""``triton_sparse_mla`` takes so many heads at most, and its union so many rows x heads."""


def load_module(name: str) -> Any:
    """Import a package of kernels; without a GPU it is of no use, and its import slow or a failure.

    Raises:
        ImportError: not installed, or no GPU.
    """
    if not torch.cuda.is_available():
        raise ImportError(f"{name} needs a GPU")
    return importlib.import_module(name)


def select_in_slices(
    logits: Callable[..., torch.Tensor],
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: tuple[torch.Tensor, torch.Tensor],
    visible: torch.Tensor,
    topk: TopK,
    k: int,
) -> torch.Tensor:
    """Select for one request's rows, as many at once as :data:`SLICE_BYTES` has room for.

    Args:
        logits: DeepGEMM's ``fp8_mqa_logits``, or what stands in its place.
        q: ``[T, H, 128]`` e4m3.
        weights: ``[T, H]`` float32, the scales of ``q`` in them.
        keys: ``[S, 128]`` e4m3 and their ``[S]`` float32 scales.
        visible: ``[T]`` int32, the tokens that each row sees.
        topk: selects.
        k: tokens to select.
    """
    starts = torch.zeros_like(visible)
    at_once = max(1, SLICE_BYTES // (4 * len(keys[0])))
    lists = []
    for low in range(0, len(q), at_once):
        rows = slice(low, low + at_once)
        scores = logits(
            q[rows], keys, weights[rows], starts[rows], visible[rows], clean_logits=False
        )
        lists.append(topk(scores, visible[rows], k))
    return lists[0] if len(lists) == 1 else torch.cat(lists)


class DeepGemm:
    """FP8 indexer logits, and a selection from them.

    Attributes:
        prefill_logits: the kernel of a prefill.
    """

    def __init__(self) -> None:
        self._module = load_module("deep_gemm")
        self.prefill_logits: Callable[..., torch.Tensor] = self._module.fp8_mqa_logits

    def schedule(self, visible: torch.Tensor) -> torch.Tensor:
        """Plan a decode step of requests that see ``visible`` tokens, once for all layers."""
        sms = torch.cuda.get_device_properties(visible.device).multi_processor_count
        make = self._module.get_paged_mqa_logits_metadata
        schedule: torch.Tensor = make(visible.view(-1, 1), PAGE_TOKENS, sms)
        return schedule

    def select_decode(
        self,
        q: torch.Tensor,
        weights: torch.Tensor,
        pages: torch.Tensor,
        block_table: torch.Tensor,
        visible: torch.Tensor,
        schedule: torch.Tensor,
        longest: int,
        topk: TopK,
        k: int,
    ) -> torch.Tensor:
        """Select for B rows, each with a row of the table.

        Args:
            q: ``[B, H, 128]`` e4m3.
            weights: ``[B, H]`` float32.
            pages: ``[P, PAGE_BYTES]`` uint8, the index-K cache.
            block_table: ``[B, pages a request]`` int32.
            visible: ``[B]`` int32.
            schedule: see :meth:`schedule`.
            longest: tokens of the longest request.
            topk: selects.
            k: tokens to select.
        """
        logits = self._module.fp8_paged_mqa_logits(
            q.unsqueeze(1),
            pages.view(-1, PAGE_TOKENS, 1, PAGE_BYTES // PAGE_TOKENS),
            weights,
            visible.view(-1, 1),
            block_table,
            schedule,
            longest,
            clean_logits=False,
        )
        return topk(logits, visible, k)


def make_topk(name: str, visible: torch.Tensor, *, decode: bool) -> TopK:
    """Make one of :data:`TOPKS`, selecting positions.

    Args:
        name: which.
        visible: of all rows, of which a call may get a part.
        decode: one row of each request, for which SGLang makes a plan once a forward.
    """
    if name == "torch.topk":  # cannot be told where a row ends and reads on; only its time is used
        return lambda logits, _seen, k: logits.topk(k).indices
    if name == LEGACY_TOPK:
        fast_topk: TopK = load_module("sgl_kernel").fast_topk_v2  # k is 2048 only
        return lambda logits, visible, k: fast_topk(logits, visible, k)
    offsets = torch.zeros_like(visible)
    if name == ENGINE_TOPK:
        v2 = load_module(_SGLANG_TOPK)
        plan = v2.plan_topk_v2(visible) if decode else None

        def engine(logits: torch.Tensor, visible: torch.Tensor, k: int) -> torch.Tensor:
            out = visible.new_empty(len(visible), k)
            if decode:
                v2.topk_transform_paged_v2(logits, visible, None, out, PAGE_TOKENS, plan)
            else:
                rows = offsets[: len(visible)]
                v2.topk_transform_ragged_v2(logits, visible, out_offsets=rows, out_indices=out)
            return out

        return engine
    transform = load_module("flashinfer").top_k_ragged_transform

    def flashinfer(logits: torch.Tensor, visible: torch.Tensor, k: int) -> torch.Tensor:
        """Select as SGLang does with ``--dsa-topk-backend flashinfer``: a contiguous copy."""
        rows = offsets[: len(visible)]
        indices: torch.Tensor = transform(
            logits.contiguous(), rows, visible, k, dsa_graph_safe=True
        )
        return indices

    return flashinfer


class FlashMla:
    """Sparse MLA, padding the heads in every call.

    Args:
        fp8: the cache's rows have 656 bytes; else they are bfloat16.
    """

    def __init__(self, *, fp8: bool) -> None:
        self._module = load_module(_FLASH_MLA)
        self._fp8 = fp8
        self._plans: dict[int, tuple[Any, ...]] = {}

    def attend(
        self, q: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Return ``[T, Hq, 512]`` of ``[T, Hq, 576]`` queries over the cache's ``[T, k]`` slots."""
        rows, heads, width = q.shape
        padded = q
        if heads not in (64, 128):
            padded = q.new_zeros(rows, padded_heads(heads), width)
            padded[:, :heads] = q
        if self._fp8:
            out = self._with_kvcache(padded, cache, slots, scale)
        else:
            out = self._module.flash_mla_sparse_fwd(
                padded, cache.unsqueeze(1), slots.unsqueeze(1), scale
            )[0]
        return out[:, :heads]

    def _with_kvcache(
        self, q: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, scale: float
    ) -> torch.Tensor:
        rows, pages = len(q), len(cache) // PAGE_TOKENS
        if rows not in self._plans:
            # The plan is empty, and filled by the first call; table and lengths are not read.
            table = torch.empty(rows, 0, dtype=torch.int32, device=q.device)
            lens = torch.full((rows,), slots.shape[1], dtype=torch.int32, device=q.device)
            self._plans[rows] = (table, lens, VALUE_DIM, *self._module.get_mla_metadata())
        pool = cache[: pages * PAGE_TOKENS].view(torch.float8_e4m3fn)
        out: torch.Tensor = self._module.flash_mla_with_kvcache(
            q.unsqueeze(1),
            pool.view(pages, PAGE_TOKENS, 1, cache.shape[1]),
            *self._plans[rows],
            softmax_scale=scale,
            is_fp8_kvcache=True,
            indices=slots.unsqueeze(1),
        )[0]
        return out.squeeze(1)


class FlashAttention3:
    """Sparse MLA of one row a request over a bfloat16 cache, as SGLang's decode calls it."""

    def __init__(self, rows: int, topk: int, device: torch.device) -> None:
        self._attend = load_module(_FA3).flash_attn_with_kvcache
        self._lens = torch.full((rows,), topk, dtype=torch.int32, device=device)
        self._starts = torch.arange(rows + 1, dtype=torch.int32, device=device)

    def attend(
        self, q: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Return ``[T, Hq, 512]``; the slots are a page table of pages of one token."""
        pages = cache.view(len(cache), 1, 1, cache.shape[1])
        out: torch.Tensor = self._attend(
            q=q[..., VALUE_DIM:],
            k_cache=pages[..., VALUE_DIM:],
            v_cache=pages[..., :VALUE_DIM],
            qv=q[..., :VALUE_DIM],
            page_table=slots,
            cache_seqlens=self._lens,
            cu_seqlens_q=self._starts,
            cu_seqlens_k_new=self._starts * slots.shape[1],
            max_seqlen_q=1,
            softmax_scale=scale,
            causal=True,
        )
        return out


class FlashMlaQ8:
    """Sparse MLA of one prompt by SGLang's FP8 kernel, over a bfloat16 cache.

    As in SGLang, every call casts the query, padded to 64 heads, and the whole prompt's cache; the
    buffers are kept. A list must be a multiple of 128 long.
    """

    def __init__(self, heads: int, rows: int, topk: int, cache: torch.Tensor) -> None:
        self._attend = load_module(_Q8).sparse_mla_q8kv8_prefill_fwd
        self._cast_q = load_module(f"{_OPS}.mla_qk_prep").concat_and_cast_q_fp8_pad
        self._gather = load_module(f"{_OPS}.dsa.dequant_k_cache").gather_cast_kv_fp8_pad_paged
        (tokens, width), padded, device = cache.shape, padded_heads(heads), cache.device
        fp8 = torch.float8_e4m3fn
        self._q = torch.zeros(rows, padded, width, dtype=fp8, device=device)
        self._kv = torch.empty(tokens + topk, width, dtype=fp8, device=device)
        self._table = torch.arange(tokens, dtype=torch.int32, device=device)
        self._one = torch.ones(1, device=device)
        self._made = {
            "out": torch.empty(rows, padded, VALUE_DIM, dtype=torch.bfloat16, device=device),
            "max_logits": torch.empty(rows, padded, device=device),
            "lse": torch.empty(rows, padded, device=device),
        }

    def attend(
        self, q: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Return ``[T, Hq, 512]``."""
        heads = q.shape[1]
        self._cast_q(self._q, q[..., :VALUE_DIM], q[..., VALUE_DIM:], heads)
        self._gather(self._kv, cache.unsqueeze(1), self._table, VALUE_DIM)
        out: torch.Tensor = self._attend(
            self._q,
            self._kv.unsqueeze(1),
            slots.unsqueeze(1),
            scale,
            self._one,
            self._one,
            VALUE_DIM,
            **self._made,
        )[0]
        return out[:, :heads]


def padded_heads(heads: int) -> int:
    """Return the number of heads that FlashMLA computes for ``heads``."""
    return 64 if heads <= 64 else 128


# -- makers of the calls that the kernel benchmark times -------------------------------------------


def select_anchors(work: Workload, tensors: IndexerTensors) -> dict[str, Callable[[], Call]]:
    """Return makers of calls that do what the select ops do."""

    def maker(name: str) -> Callable[[], Call]:
        return lambda: _select(work, tensors, name)

    return {f"deep_gemm + {name}": maker(name) for name in TOPKS}


def _select(work: Workload, tensors: IndexerTensors, name: str) -> Call:
    deep_gemm = DeepGemm()
    q, weights, visible = tensors.q, tensors.weights, tensors.visible
    topk = make_topk(name, visible, decode=not work.is_prefill)
    if work.is_prefill:
        keys, logits = (tensors.keys, tensors.scales), deep_gemm.prefill_logits
        return lambda: select_in_slices(logits, q, weights, keys, visible, topk, work.topk)
    # On Hopper SGLang has each verified row be a request of its own, whose keys are read again
    # (``dsa_backend.py``: a TODO for SM90). It repeats the table once a forward.
    table = tensors.block_table.repeat_interleave(work.verified, 0)
    pages, schedule = tensors.pages, deep_gemm.schedule(visible)
    return lambda: deep_gemm.select_decode(
        q, weights, pages, table, visible, schedule, work.context, topk, work.topk
    )


def mla_anchors(work: Workload, tensors: AttentionTensors) -> dict[str, Callable[[], Call]]:
    """Return makers of calls that attend."""
    arguments = tensors.q, tensors.cache, tensors.slots, tensors.scale

    def flash_mla() -> Call:
        anchor = FlashMla(fp8=work.fp8)
        return lambda: anchor.attend(*arguments)

    def fa3() -> Call:
        anchor = FlashAttention3(work.rows, work.topk, tensors.q.device)
        return lambda: anchor.attend(*arguments)

    def q8() -> Call:
        anchor = FlashMlaQ8(work.heads, work.rows, work.topk, tensors.cache)
        return lambda: anchor.attend(*arguments)

    def triton(union: int) -> Callable[[], Call]:
        def make() -> Call:
            attend = load_module(_TRITON_MLA).sparse_mla_prefill
            lengths = torch.full(
                (work.rows,), work.topk, dtype=torch.int32, device=tensors.q.device
            )
            return lambda: attend(*arguments, VALUE_DIM, topk_length=lengths, union=union)

        return make

    makers: dict[str, Callable[[], Call]] = {"flash_mla": flash_mla}
    if work.fp8:
        return makers
    if not work.is_prefill:
        return makers | {"fa3": fa3}
    if work.heads in (8, 16, 32, 64, 128):  # others it cannot cast
        makers["flash_mla q8"] = q8
    unions = [union for union in (2, 4) if union * work.heads in TRITON_UNION]
    if work.heads <= TRITON_HEADS:
        makers |= {f"triton_sparse_mla{f', union {n}' * (n > 0)}": triton(n) for n in (0, *unions)}
    return makers


def engine_anchors(work: Workload) -> tuple[str, ...]:
    """Return what SGLang can run for a workload; torch.topk and FlashInfer on logits are not it."""
    if work.family.startswith("select"):
        return tuple(f"deep_gemm + {name}" for name in TOPKS)
    triton = ("triton_sparse_mla", *(f"triton_sparse_mla, union {n}" for n in (2, 4)))
    return "flash_mla", "fa3", "flash_mla q8", *triton


def engine_default(work: Workload) -> str:
    """Return what SGLang 0.5.23 runs on Hopper unless told otherwise, the one to beat."""
    if work.family.startswith("mla"):
        return "fa3" if work.family == "mla_decode" and not work.fp8 else "flash_mla"
    topk = LEGACY_TOPK if work.is_prefill else ENGINE_TOPK
    return f"deep_gemm + {topk}"
