"""The engine's own kernels for the layer stack: DeepGEMM, SGLang's top-k, FlashMLA.

What SGLang 0.5.23 runs on Hopper (``layers/attention/dsa``): in prefill the index keys are
gathered, scored into a matrix within a memory budget and selected from; attention pads the heads to
64 or 128. Schedules and plans are made once for all layers and not timed, as in its metadata. The
top-k is ``sgl_kernel``'s, which 0.5.23 calls its legacy one. The packages are imported when the ops
are made, so what is missing is said before anything runs. SGLang itself is not imported.
"""

from __future__ import annotations

import importlib
from typing import Any
from weakref import WeakKeyDictionary

import torch

from benchmarks.stack.ops import Geometry, PagedCaches
from sglang_indexcache.bench.shapes import Shape
from sglang_indexcache.errors import BenchError
from sglang_indexcache.kernels.contract import INDEX_DIM, PAGE_BYTES, PAGE_TOKENS, VALUE_DIM
from sglang_indexcache.kernels.indexer.quantization import quantize_queries

LOGITS_BYTES = 4 << 30
"""Logits held at once; SGLang's own budget on an 80 GB card is of this order."""


class EngineOps(PagedCaches):
    """See :class:`~benchmarks.stack.ops.Ops`.

    Args:
        device: of the tensors.
        shape: of the model.
        fp8_kv: see :class:`~benchmarks.stack.ops.PagedCaches`.

    Raises:
        BenchError: a package is not installed or cannot be loaded here.
    """

    name = "engine: deep_gemm, sgl_kernel, flash_mla"

    def __init__(self, device: str, shape: Shape, *, fp8_kv: bool = False) -> None:
        super().__init__(device, fp8_kv=fp8_kv)
        self._deep_gemm = _load("deep_gemm")
        self._topk = _load("sgl_kernel").fast_topk_v2
        self._flash_mla = _load("flash_mla")
        self._padded_heads = 64 if shape.heads <= 64 else 128
        self._schedules: WeakKeyDictionary[Geometry, torch.Tensor] = WeakKeyDictionary()
        self._plans: dict[int, Any] = {}

    def select(
        self,
        q: torch.Tensor,
        gates: torch.Tensor,
        cache: torch.Tensor,
        geometry: Geometry,
        topk: int,
    ) -> torch.Tensor:
        """See :class:`~benchmarks.stack.ops.Ops`; prefill is of one request."""
        values, weights = quantize_queries(q, gates)
        if geometry.queries == 1:
            return self._select_decode(values, weights, cache, geometry, topk)
        if geometry.requests != 1:
            raise BenchError("the engine's prefill is measured with one request at a time")
        return self._select_prefill(values, weights, cache, geometry, topk)

    def _select_prefill(
        self,
        q: torch.Tensor,
        weights: torch.Tensor,
        cache: torch.Tensor,
        geometry: Geometry,
        topk: int,
    ) -> torch.Tensor:
        keys = _gathered(cache[geometry.block_table[0].long()], geometry.keys)
        ends = geometry.visible
        starts = torch.zeros_like(ends)
        found = torch.empty(q.shape[0], topk, dtype=torch.int32, device=q.device)
        at_once = max(1, LOGITS_BYTES // (4 * geometry.keys))
        for low in range(0, q.shape[0], at_once):
            rows = slice(low, low + at_once)
            logits = self._deep_gemm.fp8_mqa_logits(
                q[rows], keys, weights[rows], starts[rows], ends[rows], clean_logits=False
            )
            found[rows] = self._topk(logits, ends[rows], topk)
        return _as_slots(found, geometry.slots.expand(q.shape[0], -1))

    def _select_decode(
        self,
        q: torch.Tensor,
        weights: torch.Tensor,
        cache: torch.Tensor,
        geometry: Geometry,
        topk: int,
    ) -> torch.Tensor:
        lens = geometry.visible.view(-1, 1)
        if geometry not in self._schedules:
            processors = torch.cuda.get_device_properties(q.device).multi_processor_count
            make = self._deep_gemm.get_paged_mqa_logits_metadata
            self._schedules[geometry] = make(lens, PAGE_TOKENS, processors)
        logits = self._deep_gemm.fp8_paged_mqa_logits(
            q.unsqueeze(1),
            cache.view(-1, PAGE_TOKENS, 1, PAGE_BYTES // PAGE_TOKENS),
            weights,
            lens,
            geometry.block_table,
            self._schedules[geometry],
            geometry.keys,
            clean_logits=False,
        )
        return _as_slots(self._topk(logits, geometry.visible, topk), geometry.slots)

    def attend(
        self, q: torch.Tensor, latent: torch.Tensor, slots: torch.Tensor, scale: float, values: int
    ) -> torch.Tensor:
        """See :class:`~benchmarks.stack.ops.Ops`; padding the heads is part of the time."""
        heads = q.shape[1]
        padded = q.new_zeros(q.shape[0], self._padded_heads, q.shape[2])
        padded[:, :heads] = q
        out: torch.Tensor
        if self.fp8_kv:
            rows = q.shape[0]
            if rows not in self._plans:  # empty, filled by the first call
                self._plans[rows] = self._flash_mla.get_mla_metadata()
            plan, splits = self._plans[rows]
            out, _ = self._flash_mla.flash_mla_with_kvcache(
                padded.unsqueeze(1),
                latent.view(torch.float8_e4m3fn).view(-1, PAGE_TOKENS, 1, latent.shape[1]),
                None,
                None,
                VALUE_DIM,
                plan,
                splits,
                softmax_scale=scale,
                is_fp8_kvcache=True,
                indices=slots.unsqueeze(1),
            )
            out = out.squeeze(1)
        else:
            out, *_ = self._flash_mla.flash_mla_sparse_fwd(
                padded, latent.unsqueeze(1), slots.unsqueeze(1), scale
            )
        return out[:, :heads, :values]


def _gathered(pages: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Contiguous e4m3 keys ``[tokens, 128]`` and float32 scales ``[tokens]`` of some pages."""
    at = PAGE_TOKENS * INDEX_DIM
    keys = pages[:, :at].reshape(-1, INDEX_DIM)[:tokens].view(torch.float8_e4m3fn)
    scales = pages[:, at:].contiguous().view(torch.float32).flatten()[:tokens]
    return keys, scales


def _as_slots(positions: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Positions within a row's request as slots of the pool; -1 stays."""
    found = slots.gather(1, positions.clamp_min(0).long()).to(torch.int32)
    return found.masked_fill_(positions < 0, -1)


def _load(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except Exception as error:  # a library built for another driver raises what it likes
        reason = str(error).strip().splitlines() or [""]
        raise BenchError(
            f"the engine's kernels need {package}, which cannot be loaded here: "
            f"{type(error).__name__}: {reason[0][:200]}"
        ) from error
