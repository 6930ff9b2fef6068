"""Our kernels' hot loops, by the model: what the compiler made of them, and their clocks.

A loop is found by the instructions that it must hold, not by its address, so that the model follows
the code. What a kernel takes of an SM is read from the compiler's log and, for dynamic shared
memory, from the sizes of the structs.
"""

from __future__ import annotations

import random
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.kernels.cycles import DISCIPLINES, simulate
from benchmarks.kernels.machine import LOAD_CLOCKS, blocks_of_an_sm, pipe_of
from benchmarks.kernels.sass import Instruction, Loop, innermost, mix, parse
from sglang_indexcache.errors import KernelError
from sglang_indexcache.kernels.build import ARCHITECTURE, build, find_nvcc, source_folder
from sglang_indexcache.kernels.disassembly import Usage, listing, usage

ALLOWED_SLOWDOWN = 1.03
TAKEN = (1.0, 0.75)
"""How often a page's slots have something to offer: always, or as under the benchmark's logits."""
STARTS = (0.0, 700.0)
"""Clocks between two warpgroups' first pages: in phase, and about half a page apart."""


@dataclass(frozen=True)
class HotLoop:
    """Where a kernel spends its time.

    Attributes:
        folder: of ``csrc/``.
        kernel: as ``disassembly.readable`` names it.
        holds: instructions that it has at least so many of, by how their names begin.
        warps: of one sub-partition that run it, of all the blocks of an SM.
        unit: what they do together in an iteration each.
        threads: of a block.
        shared: dynamic shared memory of a block, as the launch has it in C++.
        loads: latencies of loads that are assumed, the least first.
        taken: how often it goes the longer of two ways; None: :data:`TAKEN` for products, else
            always.
        rare: an iteration leaves out inner loops with instructions whose names begin so.
    """

    folder: str
    kernel: str
    holds: Mapping[str, int]
    warps: int
    unit: str
    threads: int
    shared: str
    loads: tuple[float, ...] = (LOAD_CLOCKS,)
    taken: tuple[float, ...] | None = None
    rare: tuple[str, ...] = ()


def _indexer(kernel: str, tile: str, warps: int, unit: str, threads: int = 384) -> HotLoop:
    shared = f"sizeof(indexer::{tile}) + kSwizzlePeriod"
    return HotLoop("indexer", kernel, {"QGMMA": 4}, warps, unit, threads, shared)


_SELECT = "SelectShared<indexer::SelectTile<{}>>"
_SELECT_UNIT = "2 pages of 64 keys x 256 columns, in halves"
_RING = "Ring<indexer::Tile<{}>>"
_ATTEND = "sparse_mla::kSharedBytes"
_TOPK = HotLoop(
    "topk",
    "topk_kernel",
    {"LDG.E.128": 14},
    8,
    "28672 logits compared, and listed where they reach the bound",
    1024,
    "sizeof(topk::RowShared<1024, 8192>) + kSwizzlePeriod",
    (350.0, 700.0),
    taken=(0.3, 0.6),  # of 32 lanes with 1.2 or 2.8 % that reach it
    rare=("POPC",),  # a list that overflows
)
HOT_LOOPS: dict[str, HotLoop] = {
    "select_32": _indexer("select_kernel<32, 8>", _SELECT.format("32, 8"), 4, _SELECT_UNIT, 640),
    "select_64": _indexer("select_kernel<64, 4>", _SELECT.format("64, 4"), 4, _SELECT_UNIT, 640),
    "logits_32": _indexer(
        "logits_kernel<32, 1>", _RING.format("32, 1"), 4, "4 pages of 64 keys x 32 columns"
    ),
    "logits_64": _indexer(
        "logits_kernel<64, 1>", _RING.format("64, 1"), 4, "4 pages of 64 keys x 64 columns"
    ),
    "topk_chunk": _TOPK,
    "topk_last_chunk": replace(_TOPK, unit=f"{_TOPK.unit}; the share's last", loads=(30.0,)),
    "attend_bf16": HotLoop(
        "sparse_mla",
        "attend_kernel<0>",
        {"HGMMA": 40},
        2,
        "64 keys: scores, softmax, output",
        384,
        _ATTEND,
    ),
    "attend_fp8_load": HotLoop(
        "sparse_mla",
        "attend_kernel<1>",
        {"F2FP": 100, "LDG": 8},
        1,
        "64 keys loaded and converted by 2 warps",
        384,
        _ATTEND,
        (300.0, 600.0),
    ),
}


@dataclass(frozen=True)
class Modelled:
    """One hot loop as compiled.

    Attributes:
        instructions: of the longest and of the shortest iteration of a warp.
        pipes: of the longest, by pipe.
        clocks: the least and the most, over the disciplines of the tensor cores, the phase of the
            warps and what is assumed of the data; every warp does one iteration.
        tensor, issue: parts of the time in the least.
        registers: of a thread at entry.
        shared: bytes of a block, static and dynamic.
        blocks: that an SM holds.
    """

    kernel: str
    unit: str
    instructions: tuple[int, int]
    pipes: dict[str, int]
    clocks: tuple[float, float]
    tensor: float
    issue: float
    registers: int
    shared: int
    blocks: int

    @property
    def middle(self) -> float:
        """What the central forecast takes."""
        return sum(self.clocks) / 2

    def to_json(self) -> dict[str, object]:
        """For the results."""
        return {
            **asdict(self),
            "clocks": list(self.clocks),
            "tensor": round(self.tensor, 3),
            "issue": round(self.issue, 3),
        }


def model_all() -> dict[str, Modelled]:
    """Compile what the cache lacks, and model every loop of the table.

    Raises:
        KernelError: no nvcc or cuobjdump, or a kernel whose loop is no longer what the table says.
    """
    sizes = shared_sizes(sorted({loop.shared for loop in HOT_LOOPS.values()}))
    codes: dict[str, list[Instruction]] = {}
    used: dict[str, Usage] = {}
    for folder in sorted({loop.folder for loop in HOT_LOOPS.values()}):
        library = build(folder)
        codes |= parse(listing(library.path))
        used |= {one.kernel: one for one in usage(library.log.read_text())}
    found = {}
    for name, hot in HOT_LOOPS.items():
        own = used[hot.kernel]
        found[name] = model(hot, codes[hot.kernel], own.registers, sizes[hot.shared] + own.shared)
    return found


def model(hot: HotLoop, code: list[Instruction], registers: int, shared: int) -> Modelled:
    """One loop of a kernel's code."""
    loop = innermost(code, hot.holds).without(hot.rare)
    longest, shortest = loop.iteration(lambda: True), loop.iteration(lambda: False)
    runs = clocks_of(loop, hot.warps, hot.loads, hot.taken)
    least = min(runs)
    return Modelled(
        kernel=hot.kernel,
        unit=hot.unit,
        instructions=(len(longest), len(shortest)),
        pipes=dict(sorted(mix(longest, pipe_of).items())),
        clocks=(round(least[0], 1), round(max(runs)[0], 1)),
        tensor=least[1],
        issue=least[2],
        registers=registers,
        shared=shared,
        blocks=blocks_of_an_sm(hot.threads, registers, shared),
    )


def clocks_of(
    loop: Loop,
    warps: int,
    loads: Sequence[float] = (LOAD_CLOCKS,),
    taken: Sequence[float] | None = None,
) -> list[tuple[float, float, float]]:
    """(clocks in which every warp does an iteration, tensor part, issue part) of every assumption.

    Without products there is nothing whose order or phase could matter.
    """
    products = any(pipe_of(instruction) == "tensor" for instruction in loop.iteration(lambda: True))
    chances = taken or (TAKEN if products else TAKEN[:1])
    found = []
    for load in loads:
        for discipline in DISCIPLINES if products else DISCIPLINES[:1]:
            for gap in STARTS if products else STARTS[:1]:
                for part in chances:
                    chance = random.Random(5)
                    run = simulate(
                        [lambda c=chance, t=part: loop.iteration(lambda: c.random() < t)] * warps,  # type: ignore[misc]
                        discipline=discipline,
                        starts=[gap * warp for warp in range(warps)],
                        load_clocks=load,
                        clocks=24_000 if products else 60_000,
                    )
                    found.append((run.iteration * warps, run.tensor, run.issue))
    return found


def shared_sizes(expressions: Sequence[str]) -> dict[str, int]:
    """What C++ expressions of ``csrc/`` come to, as nvcc lays structs out; bytes.

    Raises:
        KernelError: nvcc does not compile it.
    """
    lines = ["indexer/select.cuh", "indexer/logits.cuh", "sparse_mla/attend.cuh", "topk/row.cuh"]
    source = "".join(f'#include "{line}"\n' for line in lines) + "namespace indexcache {\n"
    for number, expression in enumerate(expressions):
        source += f'extern "C" {{ __device__ char size_{number}[{expression}]; }}\n'
    with tempfile.TemporaryDirectory() as folder:
        path, ptx = Path(folder) / "sizes.cu", Path(folder) / "sizes.ptx"
        path.write_text(source + "}\n")
        flags = ["-std=c++17", f"-arch={ARCHITECTURE}", f"-I{source_folder()}", "-ptx"]
        command = [str(find_nvcc()), *flags, "-o", str(ptx), str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise KernelError(f"`{' '.join(command)}` failed:\n{done.stderr[-2000:]}")
        found = dict(re.findall(r"size_(\d+)\[(\d+)\]", ptx.read_text()))
    return {expression: int(found[str(n)]) for n, expression in enumerate(expressions)}


def slower(
    recorded: Mapping[str, Mapping[str, object]], now: Mapping[str, Sequence[float]]
) -> list[str]:
    """Loops that lost more than :data:`ALLOWED_SLOWDOWN`, in words; nothing if none did.

    Args:
        recorded: ``hot_loops`` of the results: ``clocks``, ``fastest`` (the fewest ever recorded)
            and ``reason`` (why they are not the fewest any more; empty unless somebody said so).
        now: clocks of each loop as the model has them.
    """
    found = []
    for name, clocks in now.items():
        if name not in recorded:
            found.append(f"{name} is not in the results: run the forecast")
            continue
        entry = recorded[name]
        before, fastest = _pair(entry["clocks"]), _pair(entry["fastest"])
        if _worse(clocks, before):
            found.append(f"{name}: {_said(clocks)} clocks, {_said(before)} are recorded")
        elif _worse(before, fastest) and not entry["reason"]:
            found.append(f"{name}: {_said(before)} clocks are recorded, {_said(fastest)} before")
    return found


def _worse(clocks: Sequence[float], before: Sequence[float]) -> bool:
    return any(a > ALLOWED_SLOWDOWN * b for a, b in zip(clocks, before, strict=True))


def _pair(value: object) -> list[float]:
    if not isinstance(value, Sequence):
        raise KernelError(f"clocks in the forecast are two numbers, not {value!r}")
    return [float(each) for each in value]


def _said(clocks: Sequence[float]) -> str:
    return " to ".join(f"{each:.0f}" for each in clocks)
