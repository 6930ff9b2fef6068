"""Kernels that a card's record allows instead of SGLang's defaults: ``--indexcache-kernels auto``.

``measured.json`` lists, for each card, the shapes at which SGLang's default and its possible
replacements were timed. ``python -m benchmarks.card.measured`` makes it from the committed record.

A shape between measured shapes is credited with the gain of its worst measured neighbour; a shape
outside of all measured ones is credited with no gain. A gain must reach :data:`LEAST_GAIN` to
count. The choice depends only on facts that the host knows, so it never waits for the GPU.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, TypeAlias

ENGINE = "engine"
"""SGLang's default."""
SECOND_TOPK = "sglang v2"
"""SGLang's logits with its decode top-k, run in a prefill in place of the prefill's default."""
OURS = "cuda"
LEAST_GAIN = 1.05
"""Least gain over SGLang's default that counts. A smaller gain may be noise, or may be lost to work
that the recorded calls leave out (a page lookup after :data:`SECOND_TOPK`, a gather of the keys
before SGLang's logits)."""
TABLE = Path(__file__).with_name("measured.json")
BY_TOKENS = ("select-prefill",)
"""Operations whose kernels are chosen by the context's length too. Attention reads k slots at any
length, and the CUDA graph of a decode step cannot know the length, so there the worst timed length
counts."""
SIDE_BY_SIDE = ("sparse_mla-prefill",)
"""Operations in which a call with more rows than were timed costs as much as several timed
calls."""

Tokens: TypeAlias = tuple[int, int] | None
"""Shortest and longest context of a call's requests; None if the host does not know them."""


@dataclass(frozen=True)
class Operation:
    """Kind of a call: everything but its number of rows and the length of the context.

    Attributes:
        name: as in ``--indexcache-kernels``, such as "select-prefill".
        heads: number of heads of the indexer, or of attention on one GPU.
        cache: "fp8" or "bfloat16", the format of attention's rows; "" for a selection.
        verified: number of rows of each request in a decode.
    """

    name: str
    heads: int
    cache: str = ""
    verified: int = 1


@dataclass(frozen=True)
class Shape:
    """A shape of an operation that was timed.

    Attributes:
        overlap: percentage of entries that neighbouring rows' lists shared, if it affects the time.
        times: microseconds by name; :data:`ENGINE` is among them.
    """

    operation: Operation
    rows: int
    tokens: int
    overlap: int
    times: tuple[tuple[str, float], ...]

    def gain(self, name: str) -> float:
        """Return how much faster ``name`` was than SGLang's default; 0 if it was not timed."""
        times = dict(self.times)
        return times[ENGINE] / times[name] if name in times else 0.0

    def __str__(self) -> str:
        operation = self.operation
        marks = [f"{self.rows:,} rows"]
        if operation.name in BY_TOKENS:
            marks.append(f"{self.tokens:,} tokens")
        if operation.verified > 1:
            marks.append(f"{operation.verified} verified")
        return ", ".join(marks)


@dataclass(frozen=True)
class KernelChoice:
    """Name of the kernels of a call, and the deciding shape, which has their smallest gain."""

    name: str
    why: str


@dataclass(frozen=True, eq=False)
class Routes:
    """Shapes that were timed on one card, and the largest overlap for which they may be used.

    Attributes:
        overlap: least percentage of entries that neighbouring rows' lists share, as the operator
            states; 0 is true of any lists.
    """

    card: str
    shapes: tuple[Shape, ...] = field(repr=False)
    overlap: int = 0

    @classmethod
    def of_card(cls, card: str, overlap: int = 0) -> Routes | None:
        """Return the routes of a card by its driver's name; None if it has no record."""
        rows = read(TABLE).get(card)
        return cls(card, tuple(map(shape_of, rows)), overlap) if rows else None

    def choose(self, operation: Operation, rows: int, tokens: Tokens = None) -> KernelChoice:
        """Choose the kernels of a call by its number of query rows (in a decode, of requests)."""
        return _choose(self, operation, rows, tokens if operation.name in BY_TOKENS else None)

    def without(self, name: str) -> Routes:
        """Return the routes for a server that cannot run the kernels called ``name``."""
        shapes = tuple(
            replace(shape, times=tuple(pair for pair in shape.times if pair[0] != name))
            for shape in self.shapes
        )
        return replace(self, shapes=shapes)

    def takes(self, operation: Operation) -> set[str]:
        """Return the names of the kernels that win at least one measured shape of an operation."""
        shapes = self.of(operation)
        return {
            self.choose(operation, shape.rows, (shape.tokens, shape.tokens)).name
            for shape in shapes
        }

    def of(self, operation: Operation) -> tuple[Shape, ...]:
        """Return the shapes of an operation, each at the largest overlap within the stated one."""
        best: dict[tuple[int, int], Shape] = {}
        for shape in sorted(self.shapes, key=lambda shape: shape.overlap):
            if shape.operation == operation and shape.overlap <= self.overlap:
                best[shape.rows, shape.tokens] = shape
        return tuple(best[place] for place in sorted(best))

    def describe(self, operation: Operation) -> Iterator[str]:
        """Yield a line for each measured shape at which other kernels than SGLang's are chosen."""
        for shape in self.of(operation):
            choice = self.choose(operation, shape.rows, (shape.tokens, shape.tokens))
            if choice.name != ENGINE:
                times = dict(shape.times)
                yield (
                    f"{shape}: {choice.name} ({times[choice.name]:,.0f} us, SGLang's default "
                    f"{times[ENGINE]:,.0f})"
                )


@lru_cache(maxsize=4096)
def _choose(routes: Routes, operation: Operation, rows: int, tokens: Tokens) -> KernelChoice:
    shapes = routes.of(operation)
    if not shapes:
        return KernelChoice(ENGINE, "no shape was timed")
    counts = sorted({shape.rows for shape in shapes})
    if operation.name in SIDE_BY_SIDE:
        rows = min(rows, counts[-1])
    near = list(_neighbours(counts, rows))
    around = [shape for shape in shapes if shape.rows in near]
    if tokens is not None:
        around = [shape for count in near for shape in _along(shapes, count, tokens)]
    if not around or {shape.rows for shape in around} != {*near}:
        timed = f"{counts[0]:,} to {counts[-1]:,} rows"
        if tokens is not None:
            lengths = sorted({shape.tokens for shape in shapes})
            timed += f", {lengths[0]:,} to {lengths[-1]:,} tokens"
        return KernelChoice(ENGINE, f"outside of what was timed ({timed})")
    names = {name for shape in around for name, _ in shape.times} - {ENGINE}
    worst = {name: min(around, key=lambda shape: shape.gain(name)) for name in sorted(names)}
    best = max(worst, key=lambda name: worst[name].gain(name), default=ENGINE)
    if best == ENGINE or worst[best].gain(best) < LEAST_GAIN:
        return KernelChoice(ENGINE, "nothing was faster in every neighbouring shape")
    return KernelChoice(best, f"{worst[best].gain(best):.2f}x at {worst[best]}")


def _along(shapes: Sequence[Shape], rows: int, tokens: tuple[int, int]) -> list[Shape]:
    """Return the shapes with ``rows`` rows that enclose both lengths in ``tokens``, or none."""
    of_rows = [shape for shape in shapes if shape.rows == rows]
    lengths = sorted({shape.tokens for shape in of_rows})
    ends = [[*_neighbours(lengths, length)] for length in tokens]
    if not all(ends):
        return []
    return [shape for shape in of_rows if ends[0][0] <= shape.tokens <= ends[1][-1]]


def _neighbours(values: Sequence[int], value: int) -> Iterator[int]:
    """Yield ``value`` if ``values`` has it, else both neighbours; nothing if it has only one."""
    below = [other for other in values if other <= value]
    above = [other for other in values if other >= value]
    if below and above:
        yield from sorted({below[-1], above[0]})


@cache
def read(path: Path) -> dict[str, Any]:
    """Return the rows of a table, by card."""
    cards: dict[str, Any] = json.loads(path.read_text())["cards"]
    return cards


def shape_of(row: dict[str, Any]) -> Shape:
    """Return the shape that a row of the table describes."""
    keys = ("operation", "heads", "cache", "verified")
    operation = Operation(*(row[key] for key in keys))
    times = tuple((name, float(time)) for name, time in row["times"].items())
    return Shape(operation, row["rows"], row["tokens"], row["overlap"], times)
