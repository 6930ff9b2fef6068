"""The window's kernel against the reference, which tests/test_recent.py holds against sets.

Triton decides at its first import whether kernels are compiled or interpreted, and the engine's
kernels in this process must not be: the interpreter gets a process of its own. On a card tests/gpu
holds this kernel.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang_indexcache.kernels import window
from sglang_indexcache.recent import Addresses, widen

pytestmark = pytest.mark.csrc
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not IS_INTERPRETED, reason="runs in the interpreter's process")
compiled = pytest.mark.skipif(IS_INTERPRETED, reason="under the interpreter nothing is compiled")

TOPK, LENGTH = 300, 700


def rows(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Lists of some of what each row sees, which is from nothing to more than k; and how much."""
    draw = torch.Generator().manual_seed(seed)
    visible = torch.randint(0, LENGTH, (count,), generator=draw)
    visible[:4] = torch.tensor([0, 1, TOPK, TOPK + 1])
    lists = torch.full((count, TOPK), -1, dtype=torch.int32)
    for one, sees in zip(lists, visible.tolist(), strict=True):
        chosen = torch.randperm(sees, generator=draw)[:TOPK]
        one[: len(chosen)] = chosen
    return lists, visible


def addresses(form: str, count: int) -> Addresses:
    draw = torch.Generator().manual_seed(7)
    owners = torch.randint(0, 3, (count,), generator=draw)
    if form == "slots":
        slots = torch.randperm(3 * LENGTH, generator=draw).view(3, LENGTH).int()
        return Addresses(table=slots, owners=owners)
    return Addresses(offsets=owners * LENGTH) if form == "offsets" else Addresses()


@interpreted
@pytest.mark.parametrize("form", ["positions", "slots", "offsets"])
@pytest.mark.parametrize(("width", "multiple"), [(1, 1), (8, 128), (100, 64)])
def test_agrees_with_the_reference(form: str, width: int, multiple: int) -> None:
    lists, visible = rows(24, seed=width)
    at = addresses(form, 24)
    lists = at.of(lists).int()
    each = torch.randint(0, width + 1, (24,), generator=torch.Generator().manual_seed(width)).int()
    for windows in (width, each):
        wide, counts = window.widen(lists, visible, windows, width, at, multiple)
        expected, expected_counts = widen(lists, visible, windows, width, at, multiple)
        assert torch.equal(wide, expected)
        assert torch.equal(counts, expected_counts)


@interpreted
def test_no_row_and_rows_with_holes() -> None:
    none = torch.empty(0, 4, dtype=torch.int32)
    empty, counts = window.widen(none, torch.empty(0), 2, 2, Addresses())
    assert empty.shape == (0, 6)
    assert counts.shape == (0,)
    lists = torch.tensor([[3, -1, 0, -1]], dtype=torch.int32)
    wide, counts = window.widen(lists, torch.tensor([5]), 3, 3, Addresses())
    assert wide.tolist() == [[3, 0, 4, 2, -1, -1, -1]]
    assert counts.tolist() == [4]


@compiled
def test_in_a_process_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__],
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert int(done.stdout.split(" passed")[0].split()[-1]) == 10, done.stdout


SHARED_BYTES = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}
"""A block's shared memory, by compute capability: Ampere, Ada, Hopper, Blackwell."""


@compiled
@pytest.mark.parametrize("architecture", SHARED_BYTES)
@pytest.mark.parametrize("form", ["slots", "offsets", "positions"])
@pytest.mark.parametrize("each", [True, False])
def test_it_compiles_for_every_architecture(architecture: int, form: str, each: bool) -> None:
    """Without a GPU; what has no type is a constant, None where it is not given."""
    types = dict.fromkeys(["lists", "out", "counts"], "*i32") | {"visible": "*i64"}
    types |= {"windows": "*i32" if each else "i32", "lists_stride": "i64", "table_stride": "i64"}
    types |= {"topk": "i32", "total": "i32"}
    if form == "slots":
        types |= {"table": "*i32", "owners": "*i64"}
    if form == "offsets":
        types |= {"offsets": "*i32"}
    forms = {"AS_SLOTS": form == "slots", "AS_OFFSETS": form == "offsets", "EACH": each}
    names = window._widen.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    for width in (1, 64, 1024):
        constants = {**forms, **window.tile(width)}
        values = {name: constants.get(name) for name in names if name not in types}
        source = ASTSource(window._widen, signature=signature, constexprs=values)
        target = GPUTarget("cuda", architecture, 32)
        built = triton.compile(source, target=target, options={"num_warps": 4})
        assert built.asm["cubin"]
        assert built.metadata.shared <= SHARED_BYTES[architecture]
