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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import TypeAlias

from benchmarks.kernels.cycles import DISCIPLINES, Follower, simulate
from benchmarks.kernels.machine import LOAD_CLOCKS, blocks_of_an_sm, pipe_of
from benchmarks.kernels.sass import Instruction, Loop, innermost, mix, parse
from sglang_indexcache.errors import KernelError
from sglang_indexcache.kernels.build import ARCHITECTURE, build, find_nvcc, source_folder
from sglang_indexcache.kernels.disassembly import Usage, listing, usage

ALLOWED_SLOWDOWN = 1.03
TAKEN = (1.0, 0.75)
"""How often a page's slots have something to offer: always, or as under the benchmark's logits."""
RESCALED = (0.0, 0.25)
"""How often a warpgroup scales its sums anew at a step: never, where the largest of a row's first
64 scores is within 2^8 of the largest of all; at the most at every fourth (assumed)."""
STARTS = (0.0, 700.0)
"""Clocks between two warpgroups' first pages: in phase, and about half a page apart."""


_Draw: TypeAlias = Callable[[], Sequence[Instruction]]


@dataclass(frozen=True)
class Beside:
    """The loop of a warp of another role that runs beside a sub-partition's.

    Attributes:
        holds: as of :class:`HotLoop`.
        inner: of the loop in it that runs as often as the data wants.
        rounds: how often that is, on average.
        share: its iterations for one of every other warp.
        ahead: iterations that the others may be ahead.
    """

    holds: Mapping[str, int]
    inner: Mapping[str, int]
    rounds: float
    share: float
    ahead: float


@dataclass(frozen=True)
class HotLoop:
    """Where a kernel spends its time.

    Attributes:
        folder: of ``csrc/``.
        kernel: as ``disassembly.readable`` names it.
        holds: instructions that it has at least so many of, by how their names begin.
        warps: of one sub-partition that run it, of all the blocks of an SM.
        turns: for roles that alternate: each turn, by an instruction that only it executes. Warp w
            begins with turn w.
        unit: what they do together in an iteration each.
        threads: of a block.
        shared: dynamic shared memory of a block, as the launch has it in C++.
        loads: latencies of loads that are assumed, the least first.
        beside: another role on the same sub-partition.
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
    turns: tuple[str, ...] = ()
    beside: Beside | None = None
    taken: tuple[float, ...] | None = None
    rare: tuple[str, ...] = ()


def _indexer(kernel: str, tile: str, warps: int, unit: str, threads: int = 384) -> HotLoop:
    shared = f"sizeof(indexer::{tile}) + kSwizzlePeriod"
    return HotLoop("indexer", kernel, {"QGMMA": 4}, warps, unit, threads, shared)


GATE_ROUNDS = {"": 2.0, "_busy": 6.0}
"""Logits that the busiest lane of a gate warp lists of a page, in two models of one loop; the
forecast draws a line through them."""
GATE_WARPS, RING_PAGES = 3, 8
"""``kGateWarps`` and ``kStages`` of csrc/indexer. A gate warp takes every third page, and math two
pages at a time."""


def _select(heads: int, rows: int, rounds: float) -> HotLoop:
    gate = Beside(
        {"LDS.128": 2, "ATOMS.POPC": 1},
        {"ATOMS.POPC": 1, "STG": 1},
        rounds,
        2 / GATE_WARPS,
        RING_PAGES / GATE_WARPS,
    )
    return HotLoop(
        "indexer",
        f"select_kernel<{heads}, {rows}>",
        {"QGMMA": 4},
        4,
        f"2 pages of 64 keys x 256 columns, in halves; {rounds:g} logits of a gate lane pass",
        640,
        f"sizeof(indexer::SelectShared<indexer::SelectTile<{heads}, {rows}>>) + kSwizzlePeriod",
        beside=gate,
    )


_RING = "Ring<indexer::Tile<{}>>"
_ATTEND = "sparse_mla::kSharedBytes"
_ATTEND_TURNS = ("HGMMA.64x64", "LDS")
"""A warpgroup's own step, and the other's, of which it reads the peaks."""
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
    **{f"select_32{name}": _select(32, 8, rounds) for name, rounds in GATE_ROUNDS.items()},
    **{f"select_64{name}": _select(64, 4, rounds) for name, rounds in GATE_ROUNDS.items()},
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
        turns=_ATTEND_TURNS,
    ),
    "attend_fp8": HotLoop(
        "sparse_mla",
        "attend_kernel<1>",
        {"HGMMA": 40},
        2,
        "64 keys: scores, softmax, output",
        384,
        _ATTEND,
        turns=_ATTEND_TURNS,
    ),
    "attend_fp8_load": HotLoop(
        "sparse_mla",
        "attend_kernel<1>",
        {"F2FP": 100, "LDGSTS": 16},
        1,
        "64 keys asked for and converted by 4 warps",
        384,
        _ATTEND,
        (300.0, 600.0),
        turns=("LDGSTS",),
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
    if hot.turns:
        traces = [loop.through(name) for name in hot.turns]
        longest, shortest = max(traces, key=len), min(traces, key=len)
        runs = clocks_of_turns(loop, hot)
    else:
        runs = clocks_of(loop, hot.warps, hot.loads, beside(code, hot.beside), hot.taken)
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


def beside(code: list[Instruction], other: Beside | None) -> Follower | None:
    """The other role, whose inner loop runs on average as often as is said."""
    if other is None:
        return None
    loop, inner = innermost(code, other.holds), innermost(code, other.inner)
    whole, again = loop.iteration(lambda: True), inner.iteration(lambda: True)
    at = whole.index(again[-1]) + 1
    chance = random.Random(5)

    def draw() -> Sequence[Instruction]:
        rounds = int(other.rounds) + (chance.random() < other.rounds % 1)
        return [*whole[:at], *again * (rounds - 1), *whole[at:]]

    return Follower(draw, other.share, other.ahead)


def clocks_of(
    loop: Loop,
    warps: int,
    loads: Sequence[float] = (LOAD_CLOCKS,),
    follower: Follower | None = None,
    taken: Sequence[float] | None = None,
) -> list[tuple[float, float, float]]:
    """(clocks in which every warp does an iteration, tensor part, issue part) of every assumption.

    Without products there is nothing whose order or phase could matter, without a branch nothing
    that could be taken or not.
    """
    longest, shortest = loop.iteration(lambda: True), loop.iteration(lambda: False)
    products = any(pipe_of(instruction) == "tensor" for instruction in longest)
    branches = products and longest != shortest
    chances = taken or (TAKEN if branches else TAKEN[:1])
    found = []
    for load in loads:
        for discipline in DISCIPLINES if products else DISCIPLINES[:1]:
            for gap in STARTS if products else STARTS[:1]:
                for part in chances:
                    chance = random.Random(5)
                    run = simulate(
                        [lambda c=chance, t=part: loop.iteration(lambda: c.random() < t)] * warps,  # type: ignore[misc]
                        follower=follower,
                        discipline=discipline,
                        starts=[gap * warp for warp in range(warps)],
                        load_clocks=load,
                        clocks=24_000 if products else 60_000,
                    )
                    found.append((run.iteration * warps, run.tensor, run.issue))
    return found


def clocks_of_turns(loop: Loop, hot: HotLoop) -> list[tuple[float, float, float]]:
    """As :func:`clocks_of`, of warps that alternate; what a turn seldom does: :data:`RESCALED`."""
    usual = [loop.through(name) for name in hot.turns]
    most = [
        loop.through(name, longest=True, without=_only_others(usual, turn))
        for turn, name in enumerate(hot.turns)
    ]
    found = []
    for seldom in RESCALED:
        chance = random.Random(5)

        def turns_of(warp: int, seldom: float = seldom, chance: random.Random = chance) -> _Draw:
            turn = cycle([*range(warp, len(usual)), *range(warp)])
            return lambda: (most if chance.random() < seldom else usual)[next(turn)]

        for load in hot.loads:
            for discipline in DISCIPLINES if len(usual) > 1 else DISCIPLINES[:1]:
                run = simulate(
                    [turns_of(warp) for warp in range(hot.warps)],
                    discipline=discipline,
                    load_clocks=load,
                    clocks=60_000,
                )
                found.append((run.iteration * hot.warps, run.tensor, run.issue))
    return found


def _only_others(traces: Sequence[Sequence[Instruction]], own: int) -> set[Instruction]:
    """What the other turns execute and this one does not."""
    others = {each for turn, trace in enumerate(traces) if turn != own for each in trace}
    return others - set(traces[own])


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
