"""The seam between the layer stack and the kernels: who scores, selects and attends.

``cpu`` is the blocked torch that the CPU platform serves with. Any other name is one of
``kernels.dispatch``'s implementations (``cuda``, ``triton``, ``reference``), called by the
contract of ``kernels.contracts``.
"""

from __future__ import annotations

import importlib
from typing import Any, Protocol

import torch

from sglang_indexcache.bench.errors import BenchError
from sglang_indexcache.kernels.batch import PagedBatch
from sglang_indexcache.kernels.indexer.cpu import select_topk
from sglang_indexcache.kernels.indexer.quantization import (
    PAGE_TOKENS,
    page_bytes,
    quantize_e4m3,
    write_pages,
)
from sglang_indexcache.kernels.sparse_mla.cpu import sparse_mla


class Geometry:
    """Equal requests laid end to end: each has ``keys`` tokens, the last ``queries`` are queries.

    Request ``b`` owns the slots from ``b * room`` on.

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
        pages = torch.arange(room // PAGE_TOKENS, device=device)
        self.block_table = (starts // PAGE_TOKENS + pages).to(torch.int32)
        edges = torch.arange(requests + 1, device=device) * queries
        self.query_starts = edges.to(torch.int32)
        span = torch.arange(keys - queries + 1, keys + 1, device=device)
        self.visible = span.repeat(requests).to(torch.int32)


class Ops(Protocol):
    """What a layer needs of its kernels."""

    name: str

    def index_cache(self, slots: int) -> torch.Tensor:
        """Room for the index keys of ``slots`` tokens."""

    def store(self, cache: torch.Tensor, where: torch.Tensor, keys: torch.Tensor) -> None:
        """Write ``[T, D]`` keys at the slots ``where``."""

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
        """``[T, Hq, values]`` for ``[T, Hq, latent]`` queries."""


class CpuOps:
    """``kernels/*/cpu.py`` with index keys in the dtype of the queries, as it serves by default."""

    name = "cpu"

    def index_cache(self, slots: int) -> torch.Tensor:
        """See :class:`Ops`."""
        return torch.zeros(slots, 128, dtype=torch.bfloat16)

    def store(self, cache: torch.Tensor, where: torch.Tensor, keys: torch.Tensor) -> None:
        """See :class:`Ops`."""
        cache[where] = keys.to(cache.dtype)

    def select(
        self,
        q: torch.Tensor,
        gates: torch.Tensor,
        cache: torch.Tensor,
        geometry: Geometry,
        topk: int,
    ) -> torch.Tensor:
        """See :class:`Ops`."""
        batch = PagedBatch(
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


class DispatchedOps:
    """An implementation out of ``kernels.dispatch``, by the contract: FP8 pages, slots out.

    Args:
        name: cuda, triton or reference.
        device: of the tensors.
        shape: heads of the indexer and of MLA, and k, to check what the kernels can do.

    Raises:
        BenchError: this installation has no dispatch, or the implementation cannot run here.
    """

    def __init__(self, name: str, device: str, shape: tuple[int, int, int]) -> None:
        self.name, self._device = name, device
        try:
            dispatch: Any = importlib.import_module("sglang_indexcache.kernels.dispatch")
        except ImportError as error:
            raise BenchError(f"the kernels {name!r} are not installed: {error}") from error
        index_heads, heads, topk = shape
        machine = dispatch.Machine.here()

        def required(op: str, heads: int) -> Any:
            return dispatch.require(op, name, machine, dispatch.Shape(heads=heads, topk=topk))

        self._prefill = required("indexer_select_prefill", index_heads)
        self._decode = required("indexer_select_decode", index_heads)
        self._attend = required("sparse_mla_prefill", heads)

    def index_cache(self, slots: int) -> torch.Tensor:
        """See :class:`Ops`."""
        pages = -(-slots // PAGE_TOKENS)
        return torch.zeros(pages, page_bytes(128), dtype=torch.uint8, device=self._device)

    def store(self, cache: torch.Tensor, where: torch.Tensor, keys: torch.Tensor) -> None:
        """See :class:`Ops`."""
        write_pages(cache, where, *quantize_e4m3(keys))

    def select(
        self,
        q: torch.Tensor,
        gates: torch.Tensor,
        cache: torch.Tensor,
        geometry: Geometry,
        topk: int,
    ) -> torch.Tensor:
        """See :class:`Ops`."""
        values, scales = quantize_e4m3(q)
        weights = gates * scales
        table, visible = geometry.block_table, geometry.visible
        if geometry.queries == 1:
            found = self._decode(
                values[:, None], weights[:, None], cache, table, visible[:, None], topk,
                as_slots=True,
            )  # fmt: skip
            return torch.as_tensor(found[:, 0])
        found = self._prefill(
            values, weights, cache, table, geometry.query_starts, visible, topk, as_slots=True
        )
        return torch.as_tensor(found)

    def attend(
        self, q: torch.Tensor, latent: torch.Tensor, slots: torch.Tensor, scale: float, values: int
    ) -> torch.Tensor:
        """See :class:`Ops`."""
        return torch.as_tensor(self._attend(q, latent, slots.contiguous(), scale)[0])


def load_ops(name: str, device: str, shape: tuple[int, int, int]) -> Ops:
    """The kernels called ``name``.

    Raises:
        BenchError: they cannot run on ``device``.
    """
    if name == "cpu":
        if device != "cpu":
            raise BenchError("the kernels 'cpu' run on a CPU; choose others with --kernels")
        return CpuOps()
    return DispatchedOps(name, device, shape)
