"""The kernels of others that ours are compared with, where they are installed.

An anchor is imported when it is first asked for. Whatever goes wrong then (not installed, built
for another torch, a kernel that does not take the shape) is the reason that is reported.
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.kernels.workloads import AttentionTensors, IndexerTensors, Workload

Call = Callable[[], Any]
TopK = Callable[[torch.Tensor, torch.Tensor, int], Any]
SLICE_BYTES = 4 << 30
"""Logits held at once by anchors that write them; SGLang's own budget is of this order."""


def select_anchors(work: Workload, tensors: IndexerTensors) -> dict[str, Callable[[], Call]]:
    """Makers of calls that do what the select ops do."""
    return {
        "deep_gemm + torch.topk": lambda: _deep_gemm(work, tensors, _torch_topk),
        "deep_gemm + flashinfer.top_k": lambda: _deep_gemm(work, tensors, _flashinfer_topk()),
        "deep_gemm + sgl_kernel.fast_topk_v2": lambda: _deep_gemm(work, tensors, _sglang_topk()),
    }


def topk_anchors(
    work: Workload, logits: torch.Tensor, visible: torch.Tensor
) -> dict[str, Callable[[], Call]]:
    """Makers of calls that select from given logits."""

    def bound(topk: TopK) -> Call:
        return lambda: topk(logits, visible, work.topk)

    return {
        "torch.topk": lambda: bound(_torch_topk),
        "flashinfer.top_k": lambda: bound(_flashinfer_topk()),
        "sgl_kernel.fast_topk_v2": lambda: bound(_sglang_topk()),
    }


def mla_anchors(work: Workload, tensors: AttentionTensors) -> dict[str, Callable[[], Call]]:
    """Makers of calls that attend; FlashMLA takes 64 or 128 heads, fewer are padded as SGLang does.

    The padding is done once, outside of the timing: a copy a call would be added to it.
    """
    return {"flash_mla": lambda: _flash_mla(work, tensors)}


def _torch_topk(logits: torch.Tensor, _visible: torch.Tensor, topk: int) -> torch.Tensor:
    """Cannot be told where a row ends and reads on; only its time is used."""
    return logits.topk(topk).indices


def _flashinfer_topk() -> TopK:
    """Not deterministic, the way that is fastest; where a row ends as for torch."""
    top_k = importlib.import_module("flashinfer").top_k
    return lambda logits, _visible, topk: top_k(logits, topk)


def _sglang_topk() -> TopK:
    """SGLang's legacy top-k, which its default Hopper prefill still runs; k is 2048 only."""
    fast_topk = importlib.import_module("sgl_kernel").fast_topk_v2
    return lambda logits, visible, topk: fast_topk(logits, visible, topk)


def _deep_gemm(work: Workload, tensors: IndexerTensors, topk: TopK) -> Call:
    deep_gemm = importlib.import_module("deep_gemm")
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
    pages = tensors.pages.view(-1, 64, 1, 132)
    sms = torch.cuda.get_device_properties(tensors.q.device).multi_processor_count

    def decode() -> None:
        schedule = deep_gemm.get_paged_mqa_logits_metadata(lens, 64, sms)
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
    flash_mla = importlib.import_module("flash_mla")
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
