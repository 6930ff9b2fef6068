"""Composed gain of a pattern on a deployment, before it is rented (``indexcache bench plan``).

Time is linear in the number of F layers. So a table has, for each deployment and prompt length, a
forward's time with every indexer, and what one layer's indexer takes of it. ``benchmarks.expect``
composed it from NVIDIA's measurements of single layers: nothing of it was measured as a whole.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from sglang_indexcache.errors import BenchError, LibraryError
from sglang_indexcache.lab.latency.tables import Grid
from sglang_indexcache.library.lengths import format_length
from sglang_indexcache.library.resolve import Library, name_and_pattern
from sglang_indexcache.library.sizes import checkpoint_of
from sglang_indexcache.pattern import Pattern

TABLE = Path(__file__).parent / "composed.json"
NO_RATE = "no rate for this"
Phase = Literal["prefill", "decode"]
Cost = tuple[float, float]
"""Milliseconds of a forward with every indexer, and of one layer's indexer in it."""
Patterns = Sequence[tuple[str, Pattern]]


@dataclass(frozen=True)
class Gain:
    """Gain of a pattern over every indexer on every rank.

    Attributes:
        milliseconds: of a prompt or a step with every indexer.
        gain: that time over the pattern's.
    """

    milliseconds: float
    gain: float


@dataclass(frozen=True)
class Composed:
    """Composed times of a deployment on eight GPUs.

    Attributes:
        shape: a name of :data:`~sglang_indexcache.library.sizes.PRESETS`.
        dp: ranks of data-parallel attention; 1 is tensor parallelism over all GPUs.
        layers: of the model.
        contexts: tokens, rising, at which ``costs`` are.
        costs: by "prefill", "row split" (a prefill whose rows the ranks share) and "decode"; None
            where rows are missing, or too far off.
        sources: of all parts, in sentences.
    """

    model: str
    gpu: str
    dp: int
    shape: str
    layers: int
    title: str
    contexts: tuple[int, ...]
    costs: dict[str, list[Cost | None]]
    sources: tuple[str, ...]

    def gain(
        self, phase: Phase, pattern: Pattern, context: int, *, split: bool = False
    ) -> Gain | None:
        """Return a pattern's gain over every indexer, unsplit; None where nothing is known."""
        every = self._cost(phase, context)
        mine = self._cost("row split", context) if split else every
        if every is None or mine is None:
            return None
        own = mine[0] - (self.layers - len(pattern.full_layers)) * mine[1]
        return Gain(every[0], every[0] / own)

    def _cost(self, kind: str, context: int) -> Cost | None:
        """Return a cost between two contexts on a straight line; None outside of them."""
        place = bisect_left(self.contexts, context)
        if place == len(self.contexts):
            return None
        above = self.costs[kind][place]
        if above is None or self.contexts[place] == context:
            return above
        below = self.costs[kind][place - 1] if place else None
        if below is None:
            return None
        start, end = self.contexts[place - 1 : place + 1]
        share = (context - start) / (end - start)
        first, second = ((1 - share) * a + share * b for a, b in zip(below, above, strict=True))
        return first, second


@cache
def composed() -> tuple[Composed, ...]:
    """Read the table."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    contexts = tuple(table["contexts"])
    return tuple(Composed(contexts=contexts, **row) for row in table["deployments"])


def find_composed(model: str, gpu: str, dp: int) -> Composed:
    """Return the deployment of a model, named in any case and with or without its owner.

    Raises:
        BenchError: it is not in the table.
    """
    name = model.rpartition("/")[2].lower()
    for row in composed():
        if (row.model.lower(), row.gpu, row.dp) == (name, gpu.lower(), dp):
            return row
    known = ", ".join(f"{row.model} on {row.gpu} with --dp {row.dp}" for row in composed())
    raise BenchError(
        f"nothing is composed for {model} on eight {gpu} with --dp {dp}: its layers were not "
        f"measured, or its weights do not fit. There are {known}; measure others with `indexcache "
        "bench latency`."
    )


def choose_patterns(values: Sequence[str], shape: str) -> tuple[Patterns, tuple[str, ...]]:
    """Return patterns by the names that a user gave, and notes on them.

    A ratio takes the library's pattern for this model. Where it has none, it takes as many F layers
    evenly spaced: time depends on their number only. ``shape`` is one of
    :data:`~sglang_indexcache.library.sizes.PRESETS`.

    Raises:
        IndexCacheError: a pattern that does not fit.
    """
    checkpoint = checkpoint_of(shape)
    patterns, notes = [], []
    for name, value in map(name_and_pattern, values):
        try:
            pattern = Library.default().resolve(value, checkpoint).pattern
        except LibraryError:
            if re.fullmatch("1/[0-9]+", value) is None:
                raise
            pattern = Library.default().resolve(f"uniform:{value}", checkpoint).pattern
            notes.append(
                f"No {value} pattern of {shape} is known: evenly spaced layers stand for it. "
                "They take as long; what they lose in quality is another question."
            )
        patterns.append((name, pattern))
    return patterns, tuple(notes)


def plan_grid(deployment: Composed, patterns: Patterns, contexts: Sequence[int]) -> Grid:
    """Return the gains over every indexer, laid out as the paper's Table 1."""
    rows = [
        ("Prefill of one prompt a rank",),
        *_rows_of("prefill", deployment, patterns, contexts),
    ]
    if deployment.dp < 8:
        everything = Pattern.full(deployment.layers)
        for name, pattern in [("every indexer", everything), *patterns]:
            gains = (deployment.gain("prefill", pattern, n, split=True) for n in contexts)
            rows.append((f"{name}, row split", *map(_cell, gains)))
    rows.append(("Decode, one request a rank",))
    rows += _rows_of("decode", deployment, patterns, contexts)
    header = ("", *map(format_length, contexts))
    title = f"composed speed-up over every indexer, not measured as a whole: {deployment.title}"
    return Grid(title, header, tuple(rows))


def _rows_of(
    phase: Phase, deployment: Composed, patterns: Patterns, contexts: Sequence[int]
) -> list[tuple[str, ...]]:
    """Return the time with every indexer, and a row of gains for each pattern."""
    everything = Pattern.full(deployment.layers)
    base = (deployment.gain(phase, everything, n) for n in contexts)
    scale, unit = (1e3, "s") if phase == "prefill" else (1, "ms a step")
    times = (f"{gain.milliseconds / scale:.1f}" if gain else NO_RATE for gain in base)
    rows: list[tuple[str, ...]] = [(f"every indexer, {unit}", *times)]
    for name, pattern in patterns:
        gains = (deployment.gain(phase, pattern, n) for n in contexts)
        kept = f"{len(pattern.full_layers)} of {len(pattern)} F"
        rows.append((f"{name} ({kept})", *map(_cell, gains)))
    return rows


def _cell(gain: Gain | None) -> str:
    return NO_RATE if gain is None else f"{gain.gain:.2f}x"
