"""Every Triton kernel compiles for every architecture that it claims, without a GPU."""

from collections.abc import Mapping
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang_indexcache.kernels import window
from sglang_indexcache.kernels.indexer import triton as indexer
from sglang_indexcache.kernels.sparse_mla import triton as sparse_mla
from sglang_indexcache.kernels.topk import triton as topk

pytestmark = pytest.mark.csrc

AMPERE, ADA, HOPPER, BLACKWELL = 80, 89, 90, 100
# A block's shared memory, by compute capability.
SHARED_BYTES = {AMPERE: 163 << 10, ADA: 99 << 10, HOPPER: 227 << 10, BLACKWELL: 227 << 10}
architectures = pytest.mark.parametrize("architecture", SHARED_BYTES)


def compiles(
    kernel: Any,
    architecture: int,
    types: Mapping[str, str],
    options: dict[str, int],
    **constants: Any,
) -> None:
    """Compile for one target; arguments without a type are constants, None where not given."""
    if not hasattr(kernel, "cache_key"):
        pytest.skip("under the interpreter nothing is compiled")
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    values = {name: constants.get(name) for name in names if name not in types}
    source = ASTSource(kernel, signature=signature, constexprs=values)
    target = GPUTarget("cuda", architecture, 32)
    built = triton.compile(source, target=target, options=options)
    assert built.asm["cubin"]
    assert built.metadata.shared <= SHARED_BYTES[architecture]


@architectures
def test_topk(architecture: int) -> None:
    types = dict.fromkeys(["visible", "out", "block_table", "request_of_row"], "*i32")
    types |= {"logits": "*fp32", "logits_stride": "i64", "table_stride": "i64", "topk": "i32"}
    options = {"num_warps": 8}
    compiles(topk._select, architecture, types, options, AS_SLOTS=True, BLOCK=topk.BLOCK)


@architectures
@pytest.mark.parametrize(("heads", "tile"), [(64, 2), (8, 4)])
def test_logits(architecture: int, heads: int, tile: int) -> None:
    types = {"q": "*u8", "weights": "*fp32", "pages": "*u8", "page_scales": "*fp32"}
    types |= dict.fromkeys(
        ["block_table", "tile_request", "tile_start", "tile_end", "visible"], "*i32"
    )
    types |= {"out": "*fp32", "table_stride": "i64", "out_stride": "i64"}
    compiles(
        indexer._logits,
        architecture,
        types,
        {"num_warps": 8, "num_stages": 2},
        HEADS=heads,
        TILE=tile,
        BLOCK=indexer.BLOCK_KEYS,
        SPLITS=16,
        FP8_UNIT=architecture >= ADA,
    )


@architectures
@pytest.mark.parametrize(
    ("block_heads", "fp8", "splits"), [(32, False, 1), (32, True, 1), (16, True, 8)]
)
def test_sparse_mla(architecture: int, block_heads: int, fp8: bool, splits: int) -> None:
    types = {"q": "*bf16", "rope": "*bf16", "slots": "*i32", "sinks": "*fp32", "lse": "*fp32"}
    types |= {"values": "*u8" if fp8 else "*bf16", "scales": "*fp32" if fp8 else "*bf16"}
    types |= {"out": "*bf16" if splits == 1 else "*fp32", "scale": "fp32"}
    types |= dict.fromkeys(["num_rows", "num_heads", "listed", "row_stride"], "i32")
    compiles(
        sparse_mla._attend,
        architecture,
        types,
        {"num_warps": sparse_mla.NUM_WARPS, "num_stages": 1},
        SPLITS=splits,
        FP8=fp8,
        SINKS=True,
        BLOCK_HEADS=block_heads,
        BLOCK_ROWS=sparse_mla.BLOCK_ROWS,
        INTERPRETED=False,
    )


@architectures
def test_combine(architecture: int) -> None:
    types = dict.fromkeys(["part_out", "part_lse", "sinks", "lse"], "*fp32") | {"out": "*bf16"}
    types |= {"num_rows": "i32", "num_heads": "i32"}
    constants = {"SPLITS": 8, "SINKS": True, "INTERPRETED": False}
    compiles(sparse_mla._combine, architecture, types, {"num_warps": 4}, **constants)


def test_arguments_that_are_one() -> None:
    """Triton makes constants of integers that are 1, and constants are no tensors."""
    types = dict.fromkeys(["part_out", "part_lse", "lse"], "*fp32") | {"out": "*bf16"}
    constants: dict[str, Any] = {"SPLITS": 2, "SINKS": False, "INTERPRETED": False}
    ones: dict[str, Any] = {"num_rows": 1, "num_heads": 1}
    compiles(sparse_mla._combine, HOPPER, types, {"num_warps": 4}, **constants, **ones)

    types = {"q": "*bf16", "values": "*bf16", "rope": "*bf16", "scales": "*bf16"}
    types |= {"slots": "*i32", "out": "*bf16", "lse": "*fp32", "scale": "fp32", "row_stride": "i32"}
    constants = {"SPLITS": 1, "FP8": False, "SINKS": False, "INTERPRETED": False}
    constants |= {"BLOCK_HEADS": 16, "BLOCK_ROWS": 32, "listed": 1}
    options = {"num_warps": sparse_mla.NUM_WARPS, "num_stages": 1}
    compiles(sparse_mla._attend, HOPPER, types, options, **constants, **ones)

    types = {"logits": "*fp32", "visible": "*i32", "out": "*i32"}
    compiles(
        topk._select,
        HOPPER,
        types | {"table_stride": "i32"},
        {"num_warps": 8},
        AS_SLOTS=False,
        BLOCK=topk.BLOCK,
        logits_stride=1,
        topk=1,
    )
    names = ["block_table", "tile_request", "tile_start", "tile_end", "visible"]
    types = dict.fromkeys(names, "*i32") | {"q": "*u8", "pages": "*u8"}
    types |= dict.fromkeys(["weights", "page_scales", "out"], "*fp32")
    compiles(
        indexer._logits,
        HOPPER,
        types,
        {"num_warps": 8, "num_stages": 2},
        HEADS=16,
        TILE=1,
        BLOCK=indexer.BLOCK_KEYS,
        SPLITS=1,
        FP8_UNIT=True,
        table_stride=1,
        out_stride=1,
    )


@architectures
@pytest.mark.parametrize("form", ["slots", "offsets", "positions"])
@pytest.mark.parametrize("each", [True, False])
def test_window(architecture: int, form: str, each: bool) -> None:
    types = dict.fromkeys(["lists", "out", "counts"], "*i32") | {"visible": "*i64"}
    types |= {"windows": "*i32" if each else "i32", "lists_stride": "i64", "table_stride": "i64"}
    types |= {"topk": "i32", "total": "i32"}
    if form == "slots":
        types |= {"table": "*i32", "owners": "*i64"}
    if form == "offsets":
        types |= {"offsets": "*i32"}
    forms = {"AS_SLOTS": form == "slots", "AS_OFFSETS": form == "offsets", "EACH": each}
    for width in (1, 64, 1024):
        constants = {**forms, **window.tile(width)}
        compiles(window._widen, architecture, types, {"num_warps": 4}, **constants)
