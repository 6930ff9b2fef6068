"""The clocks of a loop on one sub-partition of an SM, from its SASS.

A Hopper SM is four sub-partitions with a scheduler each; warp w of every warpgroup is on
sub-partition w, so one of them with one warp of each warpgroup shows the whole block. It issues one
instruction a clock, of the warp that issued last if that is ready, else of the first that is. An
instruction issues when the compiler's stall count and scoreboards allow it and its pipe is free
(``machine.py``). Tensor products queue at the SM's tensor cores.

Warps that run one loop meet at its barriers. A barrier at which the loop both waits and arrives is
a turn: the first half of the warps and the second pass it to each other, the first begins. A warp
of another role may *follow*: it takes what the others have finished, and they wait where it lags.

What is not modelled: conflicts at the register file, power and clocks, L2 and memory; barriers
against the loading warp are taken as ready. All of them make a loop slower, so the model is
optimistic and its ratios are worth more than its clocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeAlias

from benchmarks.kernels.machine import (
    BARRIER_CLOCKS,
    FENCE_CLOCKS,
    LOAD_CLOCKS,
    LSU_QUEUE,
    OPERANDS_READ,
    PIPE_CLOCKS,
    PRODUCT_START,
    PRODUCT_WAIT,
    latency,
    pipe_of,
    product_clocks,
)
from benchmarks.kernels.sass import NO_SCOREBOARD, Instruction

Discipline: TypeAlias = Literal["in order", "by turns", "in batches"]
"""How the tensor cores serve warps that wait: the product that came first; one of each; or all of a
warp's before the next warp's, which is what an ordering barrier between warpgroups would bring."""
DISCIPLINES: tuple[Discipline, ...] = ("in order", "by turns", "in batches")
WARM_UP = 0.2
"""Of the simulated clocks, not counted."""
NEVER = float("inf")


@dataclass(frozen=True)
class Clocks:
    """What a simulation found.

    Attributes:
        iteration: clocks in which the sub-partition finishes one iteration of one of its warps.
        tensor: part of the clocks in which the tensor cores work.
        issue: part of the clocks in which an instruction issues.
    """

    iteration: float
    tensor: float
    issue: float


Draw: TypeAlias = Callable[[], Sequence[Instruction]]
"""Gives a warp's next iteration."""


@dataclass(frozen=True)
class Follower:
    """A warp of another role, which takes what the others have finished.

    Attributes:
        draw: its iterations.
        share: of them, for one iteration of every other warp.
        ahead: iterations that the others may be ahead of what it has done.
    """

    draw: Draw
    share: float
    ahead: float


@dataclass
class _Warp:
    draw: Draw
    ready: float
    trace: Sequence[Instruction]
    at: int = 0
    turns: list[float] = field(default_factory=list)  # when it passed each of them on
    taken: int = 0  # turns
    has_turns: bool = False
    scoreboards: list[float] = field(default_factory=lambda: [0.0] * (NO_SCOREBOARD + 1))
    waiting: bool = False  # at a barrier of all the warps
    products: deque[tuple[float, float]] = field(default_factory=deque)  # (arrival, clocks)
    product_end: float = 0.0
    ended: list[float] = field(default_factory=list)  # when each iteration did

    @property
    def next(self) -> Instruction:
        return self.trace[self.at]

    def step(self, now: float) -> None:
        self.at += 1
        if self.at == len(self.trace):
            self.trace, self.at = self.draw(), 0
            self.ended.append(now)


class _Tensor:
    """The tensor cores: products that arrive, and one at a time that runs."""

    def __init__(self, warps: list[_Warp], discipline: Discipline) -> None:
        self.warps, self.discipline = warps, discipline
        self.free, self.busy, self.last = 0.0, 0.0, -1
        self.running: _Warp | None = None

    def add(self, warp: _Warp, now: float, clocks: float) -> None:
        warp.products.append((now + PRODUCT_START, clocks))

    def event(self) -> float:
        """When a product ends or begins next."""
        if self.running is not None:
            return self.free
        arrivals = [warp.products[0][0] for warp in self.warps if warp.products]
        return max(self.free, min(arrivals)) if arrivals else NEVER

    def advance(self, now: float) -> None:
        """End and begin what there is until ``now``."""
        while self.event() <= now:
            if self.running is not None:
                self.running.product_end, self.running = self.free, None
                continue
            start = self.event()
            self.last = self._choose(start)
            self.running = self.warps[self.last]
            _, clocks = self.running.products.popleft()
            self.free, self.busy = start + clocks, self.busy + clocks

    def _choose(self, start: float) -> int:
        there = [i for i, w in enumerate(self.warps) if w.products and w.products[0][0] <= start]
        if self.discipline == "in batches" and self.last in there:
            return self.last
        if self.discipline != "by turns":
            return min(there, key=lambda i: (self.warps[i].products[0][0], i))
        return min(there, key=lambda i: (i - self.last - 1) % len(self.warps))

    def done(self, warp: _Warp) -> float:
        """When all of a warp's products are done; NEVER while that is not known."""
        return NEVER if warp.products or warp is self.running else warp.product_end


class _Pipes:
    """When each execution pipe takes its next instruction."""

    def __init__(self, load_clocks: float) -> None:
        self.load_clocks = load_clocks
        self.free = dict.fromkeys(PIPE_CLOCKS, 0.0)
        self.memory = 0.0  # the shared-memory pipe has a queue

    def ready(self, instruction: Instruction) -> float:
        pipe = pipe_of(instruction)
        if pipe == "LSU":
            return self.memory - LSU_QUEUE
        return self.free[self._unit(pipe)] if pipe in ("ALU", "FMA", "IMAD", "XU") else 0.0

    def take(self, instruction: Instruction, now: float) -> float:
        """Clocks after which the result is there."""
        pipe = pipe_of(instruction)
        if pipe == "LSU":
            self.memory = max(self.memory, now) + PIPE_CLOCKS["LSU"]
            return self._latency(instruction) + self.memory - now - PIPE_CLOCKS["LSU"]
        if pipe in ("ALU", "FMA", "IMAD", "XU"):
            unit = self._unit(pipe)
            self.free[unit] = now + PIPE_CLOCKS[unit]
        return self._latency(instruction)

    def _latency(self, instruction: Instruction) -> float:
        return self.load_clocks if instruction.opcode == "LDG" else latency(instruction)

    def _unit(self, pipe: str) -> str:
        """An IMAD has one of the two halves of the FMA pipe; others take what is free first."""
        return "IMAD" if pipe == "FMA" and self.free["IMAD"] < self.free["FMA"] else pipe


def simulate(
    draws: Sequence[Draw],
    *,
    follower: Follower | None = None,
    discipline: Discipline = "in order",
    starts: Sequence[float] | None = None,
    clocks: int = 40_000,
    load_clocks: float = LOAD_CLOCKS,
) -> Clocks:
    """Run one warp of every warpgroup over and over.

    Args:
        draws: for each warp, what gives its next iteration.
        follower: what runs beside them; its iterations do not count.
        discipline: of the tensor cores.
        starts: the clock at which each warp begins; 0 where not given.
        clocks: to simulate.
        load_clocks: latency of a load from global memory.
    """
    begins = starts or [0.0] * len(draws)
    leaders = [_Warp(draw, begin, draw()) for draw, begin in zip(draws, begins, strict=True)]
    for leader in leaders:
        leader.has_turns = any(instruction.passes_turn for instruction in leader.trace)
    warps = [*leaders, _Warp(follower.draw, 0.0, follower.draw())] if follower else leaders
    tensor, pipes = _Tensor(warps, discipline), _Pipes(load_clocks)
    now, last, issued = 0.0, 0, 0
    while now < clocks:
        tensor.advance(now)
        times = [
            NEVER
            if follower and _held(i, warps, follower)
            else _earliest(warp, tensor, pipes, partial(_turn, i, leaders))
            for i, warp in enumerate(warps)
        ]
        moment = min(times)
        if moment > now:
            now = min(moment, tensor.event())
            continue
        # Who issued last goes on, else the first that can.
        last = last if times[last] <= now else next(i for i, t in enumerate(times) if t <= now)
        warp = warps[last]
        _issue(warp, tensor, pipes, now)
        issued += 1
        if all(each.waiting for each in leaders):
            for each in leaders:
                each.waiting, each.ready = False, now + BARRIER_CLOCKS
        now += 1
    since = clocks * WARM_UP
    rate = sum(_rate([end for end in warp.ended if end > since]) for warp in leaders)
    if not rate:
        raise ValueError(f"no two iterations ended within {clocks} clocks")
    return Clocks(1 / rate, tensor.busy / clocks, issued / clocks)


def _rate(ended: list[float]) -> float:
    """Iterations a clock."""
    return (len(ended) - 1) / (ended[-1] - ended[0]) if len(ended) > 1 else 0.0


def _held(index: int, warps: list[_Warp], follower: Follower) -> bool:
    """Whether a warp waits for the other role before its next iteration."""
    if warps[index].at:
        return False
    *leaders, last = warps
    if index == len(leaders):
        done = min(len(leader.ended) for leader in leaders)
        return len(last.ended) + 1 > done * follower.share
    return len(warps[index].ended) * follower.share > len(last.ended) + follower.ahead


def _turn(index: int, leaders: Sequence[_Warp]) -> float:
    """When the turn that a warp waits for was passed to it."""
    half = len(leaders) // 2
    needed = leaders[index].taken + (index >= half)  # the first half's first turn is its own
    passed = leaders[(index + half) % len(leaders)].turns
    if needed == 0:
        return 0.0
    return passed[needed - 1] + BARRIER_CLOCKS if len(passed) >= needed else NEVER


def _earliest(warp: _Warp, tensor: _Tensor, pipes: _Pipes, turn: Callable[[], float]) -> float:
    """When a warp's next instruction can issue."""
    if warp.waiting:
        return NEVER
    instruction = warp.next
    moment = max(warp.ready, pipes.ready(instruction))
    if instruction.is_barrier and warp.has_turns:
        moment = max(moment, turn())
    for scoreboard in instruction.scoreboards:
        moment = max(moment, warp.scoreboards[scoreboard])
    if instruction.awaits_products:
        moment = max(moment, tensor.done(warp) + PRODUCT_WAIT)
    return moment


def _issue(warp: _Warp, tensor: _Tensor, pipes: _Pipes, now: float) -> None:
    instruction = warp.next
    result = pipes.take(instruction, now) + now
    work = product_clocks(instruction)
    if work:
        tensor.add(warp, now, work)
    warp.scoreboards[instruction.sets] = result
    warp.scoreboards[instruction.frees] = max(
        warp.scoreboards[instruction.frees], now + OPERANDS_READ
    )
    stall = max(instruction.stall, FENCE_CLOCKS if instruction.opcode == "MEMBAR" else 0)
    warp.ready = now + stall
    if warp.has_turns:
        warp.taken += instruction.is_barrier
        warp.turns += [now] * instruction.passes_turn
    else:
        warp.waiting = instruction.is_barrier
    warp.step(now)
