"""SASS as the cycle model reads it: instructions with their control words, loops, one iteration.

Hopper's instructions are 16 bytes. The upper half ends in what the compiler decided about time:
the clocks before the next instruction of the warp may issue, the scoreboards that this one sets
when its result arrives or its operands are read, and those that it waits for. (Decoded as in Jia et
al., "Dissecting the NVIDIA Volta GPU Architecture via Microbenchmarking", 2018, section 2.1.)
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from sglang_indexcache.errors import KernelError
from sglang_indexcache.kernels.disassembly import functions

NO_SCOREBOARD = 7
_ENCODED = re.compile(
    r"^\s+/\*([0-9a-f]+)\*/\s+([^;]+?)\s*;\s*/\* 0x[0-9a-f]+ \*/\s*\n\s+/\* 0x([0-9a-f]+) \*/",
    re.MULTILINE,
)
_PREDICATE = re.compile(r"^@!?U?P\w+\s+")
_TARGET = re.compile(r"(0x[0-9a-f]+)$")


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        address: in bytes from the kernel's first.
        text: as cuobjdump writes it, with its predicate.
        stall: clocks until the warp's next instruction may issue.
        sets: scoreboard that is set until the result is there; NO_SCOREBOARD for none.
        frees: scoreboard that is set until the operands are read.
        waits: bit i: issues only when scoreboard i is clear.
    """

    address: int
    text: str
    stall: int = 1
    sets: int = NO_SCOREBOARD
    frees: int = NO_SCOREBOARD
    waits: int = 0

    @cached_property
    def name(self) -> str:
        """With its modifiers: ``QGMMA.64x256x32.F32.E4M3.E4M3``."""
        return _PREDICATE.sub("", self.text).split()[0]

    @cached_property
    def opcode(self) -> str:
        """Without them: ``QGMMA``."""
        return self.name.partition(".")[0]

    @cached_property
    def scoreboards(self) -> tuple[int, ...]:
        """Those that it waits for."""
        return tuple(scoreboard for scoreboard in range(6) if self.waits >> scoreboard & 1)

    @cached_property
    def awaits_products(self) -> bool:
        """Whether it waits for the warp's own tensor products."""
        return self.name.startswith("WARPGROUP.DEPBAR")

    @cached_property
    def is_barrier(self) -> bool:
        """Whether it waits for the other warps; one of 128 threads is for a warpgroup alone."""
        return self.name.startswith("BAR.SYNC") and not self.text.endswith(", 0x80")

    @cached_property
    def passes_turn(self) -> bool:
        """Whether it arrives at a barrier without waiting."""
        return self.name.startswith("BAR.ARV")

    @property
    def target(self) -> int | None:
        """Where a branch goes; None for what is no branch."""
        if self.opcode != "BRA":
            return None
        found = _TARGET.search(self.text)
        return int(found[1], 16) if found else None

    @property
    def falls_through(self) -> bool:
        """Whether the instruction below can be next."""
        return not re.match(r"(BRA 0x|EXIT|RET|BRX)", self.text)


def parse(listing: str) -> dict[str, list[Instruction]]:
    """Every kernel of a listing (``kernels.disassembly.listing``), by its readable name."""
    return {kernel: _decode(body) for kernel, body in functions(listing).items()}


def _decode(body: str) -> list[Instruction]:
    found = []
    for line in _ENCODED.finditer(body):
        control = int(line[3], 16) >> 41
        found.append(
            Instruction(
                address=int(line[1], 16),
                text=line[2],
                stall=(control & 15) or 1,
                sets=control >> 5 & 7,
                frees=control >> 8 & 7,
                waits=control >> 11 & 63,
            )
        )
    return found


@dataclass(frozen=True)
class Loop:
    """A natural loop: from ``header`` back to it.

    Attributes:
        code: the whole kernel's.
        header: index of its first instruction.
        body: indices of all of them.
        edges: index -> the indices that can be next within the loop, those of inner loops' ends and
            of its own left out: a walk along them comes to an end.
        ends: indices from which the loop's next iteration begins.
        spins: indices of inner loops that wait for an mbarrier; taken only where nothing else is.
        rare: indices of inner loops that no iteration goes through.
    """

    code: list[Instruction]
    header: int
    body: frozenset[int]
    edges: Mapping[int, tuple[int, ...]]
    ends: frozenset[int]
    spins: frozenset[int]
    rare: frozenset[int] = frozenset()

    def without(self, rare: Iterable[str]) -> Loop:
        """The loop, but for its inner loops that hold instructions whose names begin so."""
        starts = tuple(rare)
        inner = [
            other.body
            for other in loops(self.code)
            if other.body < self.body
            and any(self.code[index].name.startswith(starts) for index in other.body)
        ]
        return replace(self, rare=frozenset().union(*inner)) if starts else self

    def holds(self, wanted: Mapping[str, int]) -> bool:
        """Whether it has at least so many instructions whose names begin so."""
        names = [self.code[index].name for index in self.body]
        return all(
            sum(name.startswith(start) for name in names) >= least
            for start, least in wanted.items()
        )

    def iteration(self, longer: Callable[[], bool]) -> list[Instruction]:
        """What one iteration executes.

        Args:
            longer: asked wherever it can go on in two ways, whether it takes the one with more
                instructions ahead: a branch over a store that is not needed, a wait that is over.
        """
        index, found = self.header, [self.code[self.header]]
        while True:
            ways = self._ways[index]
            following = ways[-1 if len(ways) > 1 and longer() else 0]
            if following is None:
                return found
            index = following
            found.append(self.code[index])

    def through(
        self, name: str, *, longest: bool = False, without: Container[Instruction] = ()
    ) -> list[Instruction]:
        """The shortest iteration that executes an instruction called so.

        Never one through what brings parted lanes together again: a copy of the code for a case
        that does not happen.

        Args:
            longest: the longest through the same instruction instead.
            without: instructions that the longest must not execute.

        Raises:
            KernelError: no iteration does.
        """
        marks = [index for index in self.body if self.code[index].name.startswith(name)]
        ways = [way for mark in marks if (way := self._walk(mark, min, ()))]
        if not ways:
            raise KernelError(f"no iteration of the loop executes {name}")
        found = min(ways, key=len)
        if longest:
            found = self._walk(next(index for index in found if index in marks), max, without)
        return [self.code[index] for index in found]

    def _walk(
        self,
        mark: int,
        choose: Callable[..., list[int]],
        without: Container[Instruction],
    ) -> list[int]:
        """Indices of an iteration through one of them; empty if there is none."""
        # What is ahead of every instruction, with the mark still to come and without.
        best: dict[tuple[int, bool], list[int]] = {}
        for index in _children_first(self.header, self.edges):
            if self.code[index] in without or index in self.spins:
                continue
            parted = "BRA.DIV" in self.code[index].name
            after = [o for o in self.edges[index] if not parted or o == index + 1]
            for met in (False, True):
                done = met or index == mark
                ways = [best[other, done] for other in after if (other, done) in best]
                if index in self.ends and done:
                    ways.append([])
                if ways:
                    best[index, met] = [index, *choose(ways, key=len)]
        return best.get((self.header, False), [])

    @cached_property
    def _ways(self) -> dict[int, list[int | None]]:
        """What can follow an index, the shortest way first; None is the iteration's end."""
        found: dict[int, list[int | None]] = {}
        for index in self._ahead:
            ways: list[tuple[int, int | None]] = [
                (self._ahead[after], after) for after in self.edges[index] if after in self._ahead
            ]
            ways += [(0, None)] if index in self.ends else []
            ways = [way for way in ways if way[1] not in self.spins] or ways
            found[index] = [after for _, after in sorted(ways, key=lambda way: way[0])]
        return found

    @cached_property
    def _ahead(self) -> dict[int, int]:
        """Instructions of the longest way from an index to an end, itself included."""
        ahead: dict[int, int] = {}
        for index in _children_first(self.header, self.edges):
            if index in self.rare:
                continue
            ways = [ahead[after] for after in self.edges[index] if after in ahead]
            if index in self.ends:
                ways.append(0)
            if ways:
                ahead[index] = 1 + max(ways)
        return ahead


def loops(code: list[Instruction]) -> list[Loop]:
    """Every loop of a kernel, the smallest first, then by address."""
    edges = _edges(code)
    back, reached = _back_edges(edges)
    before: dict[int, list[int]] = {index: [] for index in edges}
    for index in reached:
        for other in edges[index]:
            before[other].append(index)
    bodies: dict[int, set[int]] = {}
    for end, header in sorted(back):
        body, todo = bodies.setdefault(header, {header}), [end]
        while todo:
            index = todo.pop()
            if index not in body:
                body.add(index)
                todo += before[index]
    waits = [body for body in bodies.values() if _waits(code, body)]
    found = []
    for header, body in bodies.items():
        inner = {
            index: tuple(o for o in edges[index] if o in body and (index, o) not in back)
            for index in body
        }
        ends = frozenset(end for end, first in back if first == header)
        spins = frozenset(i for other in waits if other < body for i in other)
        found.append(Loop(code, header, frozenset(body), inner, ends, spins))
    return sorted(found, key=lambda loop: (len(loop.body), loop.header))


def _waits(code: list[Instruction], body: set[int]) -> bool:
    """Whether a loop does nothing but ask an mbarrier."""
    return len(body) < 16 and any("PHASECHK" in code[index].name for index in body)


def innermost(code: list[Instruction], wanted: Mapping[str, int]) -> Loop:
    """The smallest loop that holds these instructions (:meth:`Loop.holds`).

    Raises:
        KernelError: there is none: the kernel was rewritten, and the table of hot loops was not.
    """
    found = next((loop for loop in loops(code) if loop.holds(wanted)), None)
    if found is None:
        raise KernelError(f"no loop of the kernel holds {dict(wanted)}")
    return found


def mix(trace: Iterable[Instruction], pipe: Callable[[Instruction], str]) -> Counter[str]:
    """How many instructions go to each pipe."""
    return Counter(pipe(instruction) for instruction in trace)


def _edges(code: list[Instruction]) -> dict[int, tuple[int, ...]]:
    at = {instruction.address: index for index, instruction in enumerate(code)}
    edges = {}
    for index, instruction in enumerate(code):
        after = [index + 1] if instruction.falls_through and index + 1 < len(code) else []
        if instruction.target in at:
            after.append(at[instruction.target])
        edges[index] = tuple(after)
    return edges


def _back_edges(edges: Mapping[int, tuple[int, ...]]) -> tuple[set[tuple[int, int]], set[int]]:
    """Edges to an instruction that is on the way to them, and what a walk from the first reaches.

    What it does not reach are functions that are called, and nothing.
    """
    found: set[tuple[int, int]] = set()
    stack, path, seen = [(0, iter(edges[0]))], {0}, {0}
    while stack:
        index, rest = stack[-1]
        after = next(rest, None)
        if after is None:
            stack.pop()
            path.discard(index)
        elif after in path:
            found.add((index, after))
        elif after not in seen:
            seen.add(after)
            path.add(after)
            stack.append((after, iter(edges[after])))
    return found, seen


def _children_first(root: int, edges: Mapping[int, tuple[int, ...]]) -> list[int]:
    order: list[int] = []
    seen = {root}
    stack = [(root, iter(edges[root]))]
    while stack:
        index, rest = stack[-1]
        after = next(rest, None)
        if after is None:
            order.append(index)
            stack.pop()
        elif after not in seen:
            seen.add(after)
            stack.append((after, iter(edges[after])))
    return order
