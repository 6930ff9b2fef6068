"""The seam between the layer stack and the kernels: who scores, selects and attends.

* ``cpu``: the blocked torch that the CPU platform serves with.
* ``cuda``, ``triton``, ``reference``: ours, out of ``kernels.dispatch`` and called by the contract
  of ``kernels.contract``; ``auto`` is the best of them that runs here.
* ``engine``: what SGLang runs on Hopper (``benchmarks.engine_kernels``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch

from benchmarks import engine_kernels
from sglang_indexcache.bench.shapes import ModelShape
from sglang_indexcache.errors import BenchError
from sglang_indexcache.kernels import dispatch
from sglang_indexcache.kernels.contract import (
    FP8_ROW_BYTES,
    INDEX_DIM,
    LATENT_DIM,
    PAGE_BYTES,
    PAGE_TOKENS,
    IndexerBatch,
    OpName,
)
from sglang_indexcache.kernels.indexer.cpu import HostBatch, select_topk
from sglang_indexcache.kernels.indexer.quantization import (
    quantize_e4m3,
    quantize_queries,
    write_pages,
)
from sglang_indexcache.kernels.sparse_mla.cpu import sparse_mla
from sglang_indexcache.kernels.sparse_mla.layout import quantize_latent

NAMES = ("cpu", "auto", "engine", *dispatch.NAMES)
"""What ``--kernels`` may be."""


class Geometry:
    """Equal requests laid end to end: each has ``keys`` tokens, the last ``queries`` are queries.

    Request ``b`` owns the slots from ``b * room`` on. Block tables are as wide as ``keys``, not as
    ``room``: kernels plan by their width, as for a server whose longest request this is.

    Args:
        requests: B.
        queries: of each.
        keys: tokens of each in the cache, queries included.
        room: slots of each, a multiple of the page.
        device: of the tensors.
    """

    def __init__(self, requests: int, queries: int, keys: int, room: int, device: str) -> None:
        self.requests, self.queries, self.keys = requests, queries, keys
        starts = torch.arange(requests, device=device)[:, None] * room
        self.slots = starts + torch.arange(keys, device=device)
        self.new_slots = self.slots[:, keys - queries :].reshape(-1)
        pages = torch.arange(-(-keys // PAGE_TOKENS), device=device)
        self.block_table = (starts // PAGE_TOKENS + pages).to(torch.int32)
        edges = torch.arange(requests + 1, device=device) * queries
        self.query_starts = edges.to(torch.int32)
        span = torch.arange(keys - queries + 1, keys + 1, device=device)
        self.visible = span.repeat(requests).to(torch.int32)


class Ops(Protocol):
    """What a layer needs of its kernels.

    Attributes:
        name: for results.
    """

    name: str

    def index_cache(self, slots: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Room for the index keys of ``slots`` tokens."""

    def store_keys(self, cache: torch.Tensor, where: torch.Tensor, keys: torch.Tensor) -> None:
        """Write ``[T, D]`` index keys at the slots ``where``."""

    def latent_cache(self, slots: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Room for the latent rows of ``slots`` tokens."""

    def store_latent(self, cache: torch.Tensor, where: torch.Tensor, rows: torch.Tensor) -> None:
        """Write ``[T, width]`` latent rows at the slots ``where``."""

    def select(
        self,
        q: torch.Tensor,
        gates: torch.Tensor,
        cache: torch.Tensor,
        geometry: Geometry,
        topk: int,
    ) -> torch.Tensor:
        """``[T, topk]`` int32 slots for ``[T, H, D]`` queries and ``[T, H]`` float32 gates."""

    def attend(
        self, q: torch.Tensor, latent: torch.Tensor, slots: torch.Tensor, scale: float, values: int
    ) -> torch.Tensor:
        """``[T, Hq, values]`` for ``[T, Hq, width]`` queries."""


class CpuOps:
    """``kernels/*/cpu.py`` with caches in the dtype of the weights, as it serves by default."""

    name = "cpu"

    def index_cache(self, slots: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """See :class:`Ops`."""
        return torch.zeros(slots, width, dtype=dtype)

    latent_cache = index_cache

    def store_keys(self, cache: torch.Tensor, where: torch.Tensor, keys: torch.Tensor) -> None:
        """See :class:`Ops`."""
        cache[where] = keys.to(cache.dtype)

    def store_latent(self, cache: torch.Tensor, where: torch.Tensor, rows: torch.Tensor) -> None:
        """See :class:`Ops`."""
        cache[where] = rows

    def select(
        self,
        q: torch.Tensor,
        gates: torch.Tensor,
        cache: torch.Tensor,
        geometry: Geometry,
        topk: int,
    ) -> torch.Tensor:
        """See :class:`Ops`."""
        batch = HostBatch(
            (geometry.queries,) * geometry.requests,
            (geometry.keys,) * geometry.requests,
            geometry.slots,
        )
        found = select_topk(q, gates, lambda slots: cache[slots], batch, topk)
        return batch.physical_slots(found)

    def attend(
        self, q: torch.Tensor, latent: torch.Tensor, slots: torch.Tensor, scale: float, values: int
    ) -> torch.Tensor:
        """See :class:`Ops`."""
        return sparse_mla(q, latent, slots, scale, values)[0]


class PagedCaches:
    """Caches in the layouts that a GPU serves with.

    Args:
        device: of the tensors.
        fp8_kv: latent rows of 656 bytes instead of bfloat16.
    """

    def __init__(self, device: str, *, fp8_kv: bool) -> None:
        self.device, self.fp8_kv = device, fp8_kv

    @property
    def latent_dtype(self) -> torch.dtype:
        """Of the latent cache."""
        return torch.uint8 if self.fp8_kv else torch.bfloat16

    def index_cache(self, slots: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """See :class:`Ops`; FP8 pages, whatever the ``dtype`` of the weights.

        Raises:
            BenchError: another width than the kernels'.
        """
        if width != INDEX_DIM:
            raise BenchError(
                f"these kernels read index keys of {INDEX_DIM}, this model has {width}"
            )
        pages = -(-slots // PAGE_TOKENS)
        return torch.zeros(pages, PAGE_BYTES, dtype=torch.uint8, device=self.device)

    def store_keys(self, cache: torch.Tensor, where: torch.Tensor, keys: torch.Tensor) -> None:
        """See :class:`Ops`."""
        write_pages(cache, where, *quantize_e4m3(keys))

    def latent_cache(self, slots: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """See :class:`Ops`; whole pages, which FlashMLA's FP8 kernel reads the cache as.

        Raises:
            BenchError: another width or dtype than the kernels'.
        """
        if width != LATENT_DIM or dtype != torch.bfloat16:
            raise BenchError(
                f"these kernels read latent rows of {LATENT_DIM} bfloat16, this model has {width} "
                f"{str(dtype).removeprefix('torch.')}"
            )
        rows = -(-slots // PAGE_TOKENS) * PAGE_TOKENS
        size = FP8_ROW_BYTES if self.fp8_kv else width
        return torch.zeros(rows, size, dtype=self.latent_dtype, device=self.device)

    def store_latent(self, cache: torch.Tensor, where: torch.Tensor, rows: torch.Tensor) -> None:
        """See :class:`Ops`."""
        cache[where] = quantize_latent(rows) if self.fp8_kv else rows


class DispatchedOps(PagedCaches):
    """Implementations out of ``kernels.dispatch``, by the contract: FP8 pages, slots out.

    Args:
        name: cuda, triton or reference; "auto" for the best of them, op by op.
        device: of the tensors.
        shape: of the model, to check what the kernels can do.
        fp8_kv: see :class:`PagedCaches`.

    Raises:
        KernelError: an implementation cannot run here.
    """

    def __init__(self, name: str, device: str, shape: ModelShape, *, fp8_kv: bool = False) -> None:
        super().__init__(device, fp8_kv=fp8_kv)
        machine = dispatch.Machine.here()
        used = []

        def load(op: OpName) -> Callable[..., Any]:
            best = dispatch.running(op, machine)[0]
            chosen = best if name == "auto" else dispatch.named(name).check(op, machine)
            used.append(chosen.name)
            return chosen.load(op)

        self._select, self._attend = load("select"), load("sparse_mla")
        self.name = f"auto: {', '.join(sorted(set(used)))}" if name == "auto" else name

    def select(
        self,
        q: torch.Tensor,
        gates: torch.Tensor,
        cache: torch.Tensor,
        geometry: Geometry,
        topk: int,
    ) -> torch.Tensor:
        """See :class:`Ops`."""
        values, weights = quantize_queries(q, gates)
        starts = None if geometry.queries == 1 else geometry.query_starts
        batch = IndexerBatch(values, weights, cache, geometry.block_table, geometry.visible, starts)
        found: torch.Tensor = self._select(batch, topk, as_slots=True)
        return found

    def attend(
        self, q: torch.Tensor, latent: torch.Tensor, slots: torch.Tensor, scale: float, values: int
    ) -> torch.Tensor:
        """See :class:`Ops`; ``values`` is 512 by contract."""
        out: torch.Tensor = self._attend(q, latent, slots, scale)[0]
        assert out.shape[-1] == values
        return out


class EngineOps(PagedCaches):
    """DeepGEMM, SGLang's default top-k and FlashMLA, called as SGLang calls them.

    In prefill the index keys are gathered from their pages, as in SGLang.

    Args:
        device: of the tensors.
        shape: of the model.
        fp8_kv: see :class:`PagedCaches`.

    Raises:
        BenchError: a package is not installed or cannot be loaded here.
    """

    def __init__(self, device: str, shape: ModelShape, *, fp8_kv: bool = False) -> None:
        super().__init__(device, fp8_kv=fp8_kv)
        heads = engine_kernels.padded_heads(shape.heads)
        topk = engine_kernels.ENGINE_TOPK
        self.name = f"engine: deep_gemm, {topk} top-k, flash_mla padding to {heads} heads"
        for package in engine_kernels.ENGINE_MODULES:
            _check_loads(package)
        self._deep_gemm = engine_kernels.DeepGemm()
        self._flash_mla = engine_kernels.FlashMla(fp8=fp8_kv)
        self._plans: WeakKeyDictionary[Geometry, tuple[Any, ...]] = WeakKeyDictionary()

    def select(
        self,
        q: torch.Tensor,
        gates: torch.Tensor,
        cache: torch.Tensor,
        geometry: Geometry,
        topk: int,
    ) -> torch.Tensor:
        """See :class:`Ops`; prefill is of one request."""
        values, weights = quantize_queries(q, gates)
        visible, table = geometry.visible, geometry.block_table
        if geometry.queries == 1:
            if geometry not in self._plans:
                select = engine_kernels.engine_topk_decode(visible, table)
                self._plans[geometry] = (self._deep_gemm.schedule(visible), geometry.keys, select)
            plan = self._plans[geometry]
            return self._deep_gemm.select_decode(
                values, weights, cache, table, visible, *plan, topk
            )
        if geometry.requests != 1:
            raise BenchError("the engine's prefill is measured with one request at a time")
        if geometry not in self._plans:
            first = int(geometry.slots[0, 0])  # a request's slots follow each other
            self._plans[geometry] = (engine_kernels.engine_topk_prefill(visible, first),)
        keys = engine_kernels.gathered_keys(cache[table[0].long()], geometry.keys)
        return self._deep_gemm.select_prefill(
            values, weights, keys, visible, *self._plans[geometry], topk
        )

    def attend(
        self, q: torch.Tensor, latent: torch.Tensor, slots: torch.Tensor, scale: float, values: int
    ) -> torch.Tensor:
        """See :class:`Ops`; padding the heads is part of the time."""
        return self._flash_mla.attend(q, latent, slots, scale)[..., :values]


def _check_loads(package: str) -> None:
    try:
        engine_kernels.load_module(package)
    except Exception as error:  # a library built for another driver raises what it likes
        reason = str(error).strip().splitlines() or [""]
        raise BenchError(
            f"the engine's kernels need {package}, which cannot be loaded here: "
            f"{type(error).__name__}: {reason[0][:200]}"
        ) from error


def load_ops(name: str, device: str, shape: ModelShape, *, fp8_kv: bool = False) -> Ops:
    """The kernels called ``name``.

    Args:
        name: one of :data:`NAMES`.
        device: cpu or cuda.
        shape: of the model.
        fp8_kv: latent rows of 656 bytes instead of bfloat16.

    Raises:
        BenchError: there are none of this name, or they do not run on ``device``.
        KernelError: they cannot run on this machine or this shape.
    """
    if name not in NAMES:
        raise BenchError(f"the kernels are {', '.join(NAMES)}, got {name!r}")
    if device not in ("cpu", "cuda"):
        raise BenchError(f"the device is cpu or cuda, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise BenchError("torch sees no GPU here; use --device cpu")
    if name == "cpu":
        if device != "cpu" or fp8_kv:
            raise BenchError(
                "the kernels 'cpu' run on a CPU with bfloat16 rows; choose others with --kernels"
            )
        return CpuOps()
    if name == "engine":
        return EngineOps(device, shape, fp8_kv=fp8_kv)
    return DispatchedOps(name, device, shape, fp8_kv=fp8_kv)
