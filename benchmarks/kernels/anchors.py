"""The kernels of others that ours are compared with, where they are installed.

An anchor is imported when it is first asked for. Whatever goes wrong then (not installed, built
for another torch, a kernel that does not take the shape) is the reason that is reported. What an
engine prepares once a forward for all layers (schedules, plans) is prepared outside of the timing.
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.kernels.workloads import AttentionTensors, IndexerTensors, Workload
from sglang_indexcache.kernels.contract import PAGE_TOKENS

Call = Callable[[], Any]
TopK = Callable[[torch.Tensor, torch.Tensor, int], Any]
SLICE_BYTES = 4 << 30
"""Logits held at once by anchors that write them; SGLang's own budget is of this order."""
TOPKS = ("torch.topk", "flashinfer.top_k_ragged_transform", "sgl_kernel.fast_topk_v2", "sglang v2")
"""Selections from given logits; all but torch's compile, or follow a DeepGEMM that does."""


def select_anchors(work: Workload, tensors: IndexerTensors) -> dict[str, Callable[[], Call]]:
    """Makers of calls that do what the select ops do."""

    def maker(name: str) -> Callable[[], Call]:
        return lambda: _deep_gemm(work, tensors, _topk(name, work, tensors.visible))

    return {f"deep_gemm + {name}": maker(name) for name in TOPKS}


def topk_anchors(
    work: Workload, logits: torch.Tensor, visible: torch.Tensor
) -> dict[str, Callable[[], Call]]:
    """Makers of calls that select from given logits."""

    def maker(name: str) -> Callable[[], Call]:
        def make() -> Call:
            topk = _topk(name, work, visible)
            return lambda: topk(logits, visible, work.topk)

        return make

    return {name: maker(name) for name in TOPKS}


def mla_anchors(work: Workload, tensors: AttentionTensors) -> dict[str, Callable[[], Call]]:
    """Makers of calls that attend; FlashMLA takes 64 or 128 heads, fewer are padded as SGLang does.

    The padding is done once, outside of the timing: a copy a call would be added to it.
    """
    return {"flash_mla": lambda: _flash_mla(work, tensors)}


def load_module(name: str) -> Any:
    """An anchor's module; without a GPU it is of no use, and its import slow or a failure.

    Raises:
        ImportError: not installed, or no GPU.
    """
    if not torch.cuda.is_available():
        raise ImportError(f"{name} needs a GPU")
    return importlib.import_module(name)


def _topk(name: str, work: Workload, visible: torch.Tensor) -> TopK:
    """One of :data:`TOPKS`; ``visible`` is that of all rows, of which a call may get a part."""
    if name == "torch.topk":
        return _torch_topk
    if name == "sgl_kernel.fast_topk_v2":
        return _sgl_kernel_topk()
    if name == "sglang v2":
        return _sglang_v2_topk(work, visible)
    return _flashinfer_topk(visible)


def _torch_topk(logits: torch.Tensor, _visible: torch.Tensor, topk: int) -> torch.Tensor:
    """Cannot be told where a row ends and reads on; only its time is used."""
    return logits.topk(topk).indices


def _flashinfer_topk(visible: torch.Tensor) -> TopK:
    """As SGLang calls it with ``--dsa-topk-backend flashinfer``, with its contiguous copy."""
    transform = load_module("flashinfer").top_k_ragged_transform
    offsets = torch.zeros_like(visible)
    return lambda logits, seen, topk: transform(
        logits.contiguous(), offsets[: len(seen)], seen, topk, dsa_graph_safe=True
    )


def _sgl_kernel_topk() -> TopK:
    """SGLang's legacy top-k; k is 2048 only."""
    fast_topk = load_module("sgl_kernel").fast_topk_v2
    return lambda logits, seen, topk: fast_topk(logits, seen, topk)


def _sglang_v2_topk(work: Workload, visible: torch.Tensor) -> TopK:
    """What SGLang 0.5.23 runs by default: ragged for prefill, planned for decode.

    Positions are asked for, no page table is read; ours are asked for the same.
    """
    v2 = load_module("sglang.kernels.ops.attention.dsv4.topk")
    offsets = torch.zeros_like(visible)
    plan = v2.plan_topk_v2(visible) if work.family == "select_decode" else None

    def topk(logits: torch.Tensor, seen: torch.Tensor, topk: int) -> torch.Tensor:
        out = seen.new_empty(len(seen), topk)
        if plan is None:
            rows = offsets[: len(seen)]
            v2.topk_transform_ragged_v2(logits, seen, out_offsets=rows, out_indices=out)
        else:
            v2.topk_transform_paged_v2(logits, seen, None, out, PAGE_TOKENS, plan)
        return out

    return topk


def _deep_gemm(work: Workload, tensors: IndexerTensors, topk: TopK) -> Call:
    deep_gemm = load_module("deep_gemm")
    if work.is_prefill:
        starts = torch.zeros_like(tensors.visible)
        at_once = max(128, SLICE_BYTES // (4 * work.context))

        def prefill() -> None:
            for low in range(0, work.rows, at_once):
                rows = slice(low, low + at_once)
                logits = deep_gemm.fp8_mqa_logits(
                    tensors.q[rows],
                    (tensors.keys, tensors.scales),
                    tensors.weights[rows],
                    starts[rows],
                    tensors.visible[rows],
                    clean_logits=False,
                )
                topk(logits, tensors.visible[rows], work.topk)

        return prefill
    lens = tensors.visible.view(-1, 1)
    pages = tensors.pages.view(-1, PAGE_TOKENS, 1, 132)
    sms = torch.cuda.get_device_properties(tensors.q.device).multi_processor_count
    schedule = deep_gemm.get_paged_mqa_logits_metadata(lens, PAGE_TOKENS, sms)

    def decode() -> None:
        logits = deep_gemm.fp8_paged_mqa_logits(
            tensors.q.unsqueeze(1),
            pages,
            tensors.weights,
            lens,
            tensors.block_table,
            schedule,
            work.context,
            clean_logits=False,
        )
        topk(logits, tensors.visible, work.topk)

    return decode


def _flash_mla(work: Workload, tensors: AttentionTensors) -> Call:
    flash_mla = load_module("flash_mla")
    padded = 64 if work.heads <= 64 else 128
    q = tensors.q.new_zeros(work.rows, padded, tensors.q.shape[-1])
    q[:, : work.heads] = tensors.q
    if not work.fp8:
        cache, slots = tensors.cache.unsqueeze(1), tensors.slots.unsqueeze(1)
        return lambda: flash_mla.flash_mla_sparse_fwd(q, cache, slots, tensors.scale)
    pages = tensors.cache.shape[0] // 64
    cache = tensors.cache[: pages * 64].view(torch.float8_e4m3fn).view(pages, 64, 1, 656)
    lens = torch.full((work.rows,), work.context, dtype=torch.int32, device=q.device)
    plan, splits = flash_mla.get_mla_metadata()  # of FlashMLA 1.0; filled by the first call
    no_table = torch.empty(work.rows, 0, dtype=torch.int32, device=q.device)
    return lambda: flash_mla.flash_mla_with_kvcache(
        q.unsqueeze(1),
        cache,
        no_table,
        lens,
        512,
        plan,
        splits,
        softmax_scale=tensors.scale,
        is_fp8_kvcache=True,
        indices=tensors.slots.unsqueeze(1),
    )
