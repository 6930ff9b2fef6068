"""Checks of an op's arguments against the contract before a launch, as far as the host can see.

Values on the device are never read: that would synchronise the stream and break CUDA graphs.
"""

from collections.abc import Sequence

import torch

from sglang_indexcache.errors import KernelError
from sglang_indexcache.kernels.contract import (
    FP8_ROW_BYTES,
    INDEX_DIM,
    INDEXER_HEADS,
    LATENT_DIM,
    MAX_MLA_HEADS,
    MAX_NEXT_N,
    MAX_PAGES,
    MAX_TOPK,
    PAGE_BYTES,
    PAGE_TOKENS,
    IndexerBatch,
)


class Arguments:
    """Tensors of one call, whose dimensions must agree: each letter stands for one size."""

    def __init__(self, op: str, device: torch.device) -> None:
        self._op, self._device = op, device
        self.sizes: dict[str, int] = {}

    def check(
        self,
        name: str,
        tensor: torch.Tensor | None,
        dtype: torch.dtype,
        dims: Sequence[int | str],
        *,
        strided_rows: bool = False,
    ) -> None:
        """Check one tensor; None is an optional argument that was not given.

        Raises:
            KernelError: the dtype, device, shape or layout is not the contract's.
        """
        if tensor is None:
            return
        contract = f"[{', '.join(map(str, dims))}] {_short(dtype)} on {self._device}"
        if (
            tensor.dtype != dtype
            or tensor.device != self._device
            or not self._matches(tensor.shape, dims)
        ):
            sizes = ", ".join(f"{letter} = {size}" for letter, size in self.sizes.items())
            letters = f" ({sizes})" if sizes else ""
            actual = f"{list(tensor.shape)} {_short(tensor.dtype)} on {tensor.device}"
            self._fail(f"{name} must be {contract}, not {actual}{letters}")
        contiguous = tensor.stride(-1) == 1 or tensor.shape[-1] <= 1
        if not (contiguous if strided_rows else tensor.is_contiguous()):
            self._fail(f"{name} must be contiguous, its strides are {tensor.stride()}")

    def require(self, holds: bool, message: str) -> None:
        """Raise KernelError with ``message`` unless ``holds``."""
        if not holds:
            self._fail(message)

    def _matches(self, shape: torch.Size, dims: Sequence[int | str]) -> bool:
        if len(shape) != len(dims):
            return False
        for size, dim in zip(shape, dims, strict=True):
            expected = dim if isinstance(dim, int) else self.sizes.setdefault(dim, size)
            if size != expected:
                return False
        return True

    def _fail(self, message: str) -> None:
        raise KernelError(f"{self._op}: {message}")


def check_indexer(op: str, batch: IndexerBatch) -> None:
    """Check the batch of an indexer op."""
    arguments = Arguments(op, batch.q.device)
    arguments.check("q", batch.q, torch.float8_e4m3fn, ["T", "H", INDEX_DIM])
    arguments.check("weights", batch.weights, torch.float32, ["T", "H"])
    arguments.check("visible", batch.visible, torch.int32, ["T"])
    arguments.check("pages", batch.pages, torch.uint8, ["P", PAGE_BYTES])
    arguments.check("block_table", batch.block_table, torch.int32, ["B", "W"], strided_rows=True)
    heads, rows, requests = (arguments.sizes[letter] for letter in "HTB")
    arguments.check("query_starts", batch.query_starts, torch.int32, [requests + 1])
    arguments.require(heads in INDEXER_HEADS, f"{heads} heads; there are {INDEXER_HEADS}")
    width = arguments.sizes["W"]
    arguments.require(
        width <= MAX_PAGES,
        f"block_table has {width} columns; {MAX_PAGES} ({MAX_PAGES * PAGE_TOKENS} tokens) are the "
        "most: start the engine with a shorter context",
    )
    if batch.query_starts is None:
        each = batch.rows_per_request
        arguments.require(
            rows == each * requests and 1 <= each <= MAX_NEXT_N,
            f"{rows} rows of {requests} requests; without query_starts each has as many, 1 to "
            f"{MAX_NEXT_N}",
        )
    aligned = batch.pages.data_ptr() % 16 == 0
    arguments.require(aligned, "pages must begin at a multiple of 16 bytes")


def check_topk(topk: int, op: str = "topk") -> None:
    """Check the k of a selection."""
    if not 1 <= topk <= MAX_TOPK:
        raise KernelError(f"{op}: k is {topk}; it can be 1 to {MAX_TOPK}")


def check_logits(logits: torch.Tensor, visible: torch.Tensor, topk: int) -> None:
    """Check the arguments of the top-k op."""
    arguments = Arguments("topk", logits.device)
    arguments.check("logits", logits, torch.float32, ["T", "S"], strided_rows=True)
    arguments.check("visible", visible, torch.int32, ["T"])
    check_topk(topk)


def check_sparse_mla(
    q: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    sinks: torch.Tensor | None,
    lengths: torch.Tensor | None = None,
) -> None:
    """Check the arguments of sparse MLA."""
    arguments = Arguments("sparse_mla", q.device)
    arguments.check("q", q, torch.bfloat16, ["T", "Hq", LATENT_DIM])
    if cache.dtype == torch.uint8:
        arguments.check("cache", cache, torch.uint8, ["N", FP8_ROW_BYTES])
    else:
        arguments.check("cache", cache, torch.bfloat16, ["N", LATENT_DIM])
    arguments.check("slots", slots, torch.int32, ["T", "k"])
    arguments.check("sinks", sinks, torch.float32, ["Hq"])
    arguments.check("lengths", lengths, torch.int32, ["T"])
    heads = arguments.sizes["Hq"]
    arguments.require(1 <= heads <= MAX_MLA_HEADS, f"{heads} heads; 1 to {MAX_MLA_HEADS} are known")
    arguments.require(arguments.sizes["k"] >= 1, "slots must list at least one slot a row")
    arguments.require(cache.data_ptr() % 16 == 0, "cache must begin at a multiple of 16 bytes")


def require_aligned(op: str, **tensors: torch.Tensor) -> None:
    """Refuse tensors that are not 16-byte aligned, as TMA and cp.async need them to be.

    Raises:
        KernelError: names the tensor.
    """
    for name, tensor in tensors.items():
        if tensor.data_ptr() % 16:
            raise KernelError(f"{op}: {name} must begin at a multiple of 16 bytes; clone() it")


def output(
    op: str,
    out: torch.Tensor | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    *,
    strided_rows: bool = False,
) -> torch.Tensor:
    """Return ``out`` after checking that a kernel can write to it, or a new tensor if it is None.

    Raises:
        KernelError: ``out`` has another shape, dtype, device or layout.
    """
    if out is None:
        return torch.empty(shape, dtype=dtype, device=device)
    Arguments(op, device).check("out", out, dtype, shape, strided_rows=strided_rows)
    return out


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
