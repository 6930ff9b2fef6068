"""What a pattern gains on a deployment, before anybody rents one.

Composed from measured rows of its layers where there are any (:mod:`.forward`); by a roofline, and
for prefill only, where there are none. What ``bench latency`` measured on the reader's own servers
stands beside it, with the difference.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sglang_indexcache.bench import roofline
from sglang_indexcache.bench.forward import MODELS, MOST_OFF, Deployment, Forwards
from sglang_indexcache.bench.results import LatencyResult, Metric, amdahl, load, removed_share
from sglang_indexcache.bench.roofline import find_gpu
from sglang_indexcache.bench.rows import LatencyEstimate
from sglang_indexcache.bench.shapes import ModelShape, checkpoint_of, preset, shape_of
from sglang_indexcache.bench.tables import Grid
from sglang_indexcache.checkpoint import read_config
from sglang_indexcache.errors import BenchError, LibraryError, PatternError
from sglang_indexcache.library import Library
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.support.lengths import format_length

NO_RATE = "no rate for this"
NAMES: dict[Metric, str] = {
    "prefill": "Prefill of one prompt a rank",
    "decode": "Decode, one request a rank",
    "full": "Decode, as many requests as cache and rows have (their number in brackets)",
}
Patterns = Sequence[tuple[str, Pattern]]


@dataclass(frozen=True)
class Cell:
    """One figure.

    Attributes:
        milliseconds: with every indexer; None where only a ratio is known.
        gain: the speed-up over that.
        off: what either may be off by, as a part; None where it was not checked.
        requests: of a rank at once.
    """

    milliseconds: float | None
    gain: float
    off: float | None = None
    requests: int = 1


class Source(Protocol):
    """Where gains are from.

    Attributes:
        title: what of, in words.
        metrics: what it knows.
    """

    title: str
    metrics: tuple[Metric, ...]

    @property
    def sources(self) -> tuple[str, ...]:
        """From where, in sentences."""

    def cell(self, metric: Metric, pattern: Pattern, context: int) -> Cell | None:
        """The gain of a pattern; None where nothing is known, or what is may be too far off."""


class Composed:
    """Measured rows, put together.

    Args:
        deployment: of what.
        data: the wheel's data folder; where pip put it, if left out.

    Raises:
        BenchError: see :class:`sglang_indexcache.bench.forward.Forwards`.
    """

    metrics: tuple[Metric, ...] = ("prefill", "decode", "full")

    def __init__(self, deployment: Deployment, data: Path | None = None) -> None:
        self.forwards = Forwards(deployment, data)
        self._deployment = deployment
        self.title = str(deployment)

    @property
    def sources(self) -> tuple[str, ...]:
        """See :class:`Source`: the rows, whether the weights fit, and what was left out."""
        said = [*self.forwards.sources]
        gpu = find_gpu(self._deployment.gpu)
        if self._deployment.cache_tokens <= 0:
            said.append(
                f"THE WEIGHTS DO NOT FIT: {self._deployment.weight_bytes / 1e9:.0f} GB a GPU, "
                f"{gpu.name} has {gpu.memory / 1e9:.0f}. These are the times of its layers if they "
                "did; more GPUs add communication that is not counted here."
            )
        used = self.forwards.contradictions
        if used:
            said.append(f"Rows that contradict others, left out: {'; '.join(used)}.")
        return tuple(said)

    def cell(self, metric: Metric, pattern: Pattern, context: int) -> Cell | None:
        """See :class:`Source`."""
        requests = self.forwards.requests(context) if metric == "full" else 1
        full, mine = (
            self._time(metric, count, requests, context)
            for count in (len(pattern), len(pattern.full_layers))
        )
        if full is None or mine is None or max(full.off, mine.off) > MOST_OFF:
            return None
        return Cell(full.value, full.value / mine.value, max(full.off, mine.off), requests)

    def _time(
        self, metric: Metric, full_layers: int, requests: int, context: int
    ) -> LatencyEstimate | None:
        if metric == "prefill":
            return self.forwards.prefill(full_layers, context)
        return self.forwards.decode(full_layers, requests, context)


class Roofline:
    """Published rates of the kernels and a data sheet: for models that nobody measured.

    See :mod:`sglang_indexcache.bench.roofline`. Its prefill is within a tenth of the paper's Table
    1 from 60K on; decode is not predicted, because launches and latencies decide it.
    """

    metrics: tuple[Metric, ...] = ("prefill",)

    def __init__(self, shape: ModelShape, gpu: str, gpus: int = 1, dp: int = 1) -> None:
        self._shape, self._gpu, self._ranks = shape, find_gpu(gpu), gpus // dp
        self.title = f"{shape.name}, {gpus} x {self._gpu.name}, {gpus // dp} to a prompt"

    @property
    def sources(self) -> tuple[str, ...]:
        """See :class:`Source`."""
        return (
            f"A roofline of {self._gpu.name}, not a measurement: no rows of this shape exist. "
            "Communication is left out. Decode is not predicted: launches and latencies decide it.",
        )

    def cell(self, metric: Metric, pattern: Pattern, context: int) -> Cell | None:
        """See :class:`Source`."""
        if metric != "prefill":
            return None
        one = roofline.prefill_layer(self._shape, self._gpu, context, self._ranks)
        return Cell(None, amdahl(one.indexer / one.full, _removed(pattern)))


class OwnRows:
    """What ``bench latency`` measured on the reader's servers, all F among them.

    A pattern with another number of F layers than any that was measured gets what Amdahl's law
    makes of the sparsest that was.

    Args:
        path: its ``latency.json``.
        shape: of the model that is planned.

    Raises:
        BenchError: not such a file, or of another shape, or without a baseline of all F.
    """

    def __init__(self, path: Path, shape: ModelShape) -> None:
        result = load(LatencyResult, path)
        known = checkpoint_of(shape).shape
        if any(result.model.shape.get(name) != value for name, value in known.items()):
            raise BenchError(f"{path} was measured with another shape than {shape.name}")
        if result.baseline.parsed.shared_layers:
            raise BenchError(
                f"the baseline of {path} is {result.baseline.name}, not the full pattern"
            )
        self._result = result
        self.metrics: tuple[Metric, ...] = result.metrics
        machine = result.environment
        where = ", ".join(sorted(set(machine.gpus))) if result.started_here else "other machines"
        self.title = f"your servers of {result.model.name}"
        self.sources = (
            f"Your servers: {path}, {result.model.name} on {where or machine.cpu}, {machine.date}, "
            f"{' '.join(result.arguments) or 'no flags'}.",
        )

    def cell(self, metric: Metric, pattern: Pattern, context: int) -> Cell | None:
        """See :class:`Source`; only lengths that were measured."""
        result = self._result
        if metric not in result.metrics or context not in result.lengths:
            return None
        others = [c for c in result.configurations if c.parsed.shared_layers]
        same = [c for c in others if len(c.parsed.full_layers) == len(pattern.full_layers)]
        if not others:
            return None
        nearest = (same or sorted(others, key=lambda c: len(c.parsed.full_layers)))[0]
        speed = result.speedup(nearest.name, metric, context)
        gain, off = speed.median, max(speed.high / speed.median, speed.median / speed.low) - 1
        if not same:
            removed = removed_share(result.baseline.parsed, nearest.parsed)
            gain = amdahl((1 - 1 / gain) / removed, _removed(pattern))
        return Cell(None, gain, off)


def _removed(pattern: Pattern) -> float:
    return len(pattern.shared_layers) / len(pattern)


def choose_source(
    model: str, gpu: str, gpus: int, dp: int, kv: str, data: Path | None = None
) -> tuple[ModelShape, Source]:
    """The model's shape, and measured rows if there are any of it.

    Args:
        model: a name of :data:`sglang_indexcache.bench.forward.MODELS` in any case, of a published
            shape, or a checkpoint folder.
        gpu: a name of :data:`sglang_indexcache.bench.roofline.GPUS`.
        gpus: how many.
        dp: ranks of data-parallel attention.
        kv: the cache's format, or "" for the engine's default.
        data: the wheel's data folder; where pip put it, if left out.

    Raises:
        BenchError: an unknown model or GPU, no rows, or the wheel is missing.
    """
    name = _measured_name(model)
    if name is None:
        shape = shape_of(model)
        return shape, Roofline(shape, gpu, gpus, dp)
    deployment = Deployment(name, gpu.lower(), gpus, dp, kv)
    return deployment.shape, Composed(deployment, data)


def _measured_name(model: str) -> str | None:
    """A name of :data:`MODELS` for what the user gave; a folder by its shape and its weights."""
    by_name = {name.lower(): name for name in MODELS}
    if not Path(model).is_dir():
        return by_name.get(model.rpartition("/")[2].lower())
    shape = shape_of(model)
    weights = "fp8_block" if read_config(Path(model)).get("quantization_config") else "bfloat16"
    for name, known in MODELS.items():
        same = preset(known.shape).model_dump(exclude={"name"}) == shape.model_dump(
            exclude={"name"}
        )
        if same and known.weights == weights:
            return name
    return None


def choose_patterns(values: Sequence[str], shape: ModelShape) -> tuple[Patterns, tuple[str, ...]]:
    """Patterns by the names that a user gave, and what to know about them.

    A ratio takes the library's pattern for this model. Where it has none, it takes as many F layers
    evenly spaced: time depends on their number only.

    Raises:
        IndexCacheError: a pattern that does not fit.
    """
    checkpoint = checkpoint_of(shape)
    found, said = [], []
    for value in values:
        try:
            pattern = Library.default().resolve(value, checkpoint).pattern
        except LibraryError:
            if re.fullmatch(r"1/\d+", value) is None:
                raise
            pattern = Library.default().resolve(f"uniform:{value}", checkpoint).pattern
            said.append(
                f"No {value} pattern of {shape.name} is known: evenly spaced layers stand for it. "
                "They take as long; what they lose in quality is another question."
            )
        pattern.check_length(shape.layers)
        if pattern.window:
            raise PatternError(
                f"what a recent window costs has not been measured, so no plan can be made for "
                f"{value}. Plan the pattern without it."
            )
        found.append((value, pattern))
    return found, tuple(said)


def plan_grid(
    source: Source, patterns: Patterns, contexts: Sequence[int], own: OwnRows | None = None
) -> Grid:
    """Gains over every indexer on, laid out as the paper's Table 1, the reader's own rows beside.

    Args:
        source: of the gains.
        patterns: by name.
        contexts: tokens.
        own: the reader's measurement, shown with its difference from ``source``.
    """
    rows: list[tuple[str, ...]] = []
    for metric, title in NAMES.items():
        rows.append((title,))
        found = [[source.cell(metric, pattern, n) for n in contexts] for _, pattern in patterns]
        unit = "s" if metric == "prefill" else "ms a step"
        base = [_base(cells, metric) for cells in zip(*found, strict=True)]
        if any(base):
            rows.append((f"every indexer, {unit}", *(text or NO_RATE for text in base)))
        for (name, pattern), cells in zip(patterns, found, strict=True):
            rows.append(
                (f"{name} ({len(pattern.full_layers)} of {len(pattern)} F)", *map(_gain, cells))
            )
            if own is not None and metric in own.metrics:
                mine = [own.cell(metric, pattern, n) for n in contexts]
                rows.append((f"{name}, yours", *map(_difference, mine, cells)))
    header = ("", *map(format_length, contexts))
    return Grid(f"expected speed-up over DSA: {source.title}", header, tuple(rows))


def _base(cells: Sequence[Cell | None], metric: Metric) -> str:
    """The time with every indexer, which all patterns have in common."""
    one = next((c for c in cells if c is not None and c.milliseconds is not None), None)
    if one is None or one.milliseconds is None:
        return ""
    if metric == "prefill":
        return f"{one.milliseconds / 1e3:.1f}"
    return f"{one.milliseconds:.1f}" + (f" ({one.requests})" if metric == "full" else "")


def _gain(cell: Cell | None) -> str:
    return NO_RATE if cell is None else f"{cell.gain:.2f}x"


def _difference(mine: Cell | None, theirs: Cell | None) -> str:
    if mine is None:
        return "not measured"
    if theirs is None:
        return f"{mine.gain:.2f}x"
    return f"{mine.gain:.2f}x ({mine.gain / theirs.gain - 1:+.0%})"


def range_said(source: Source, patterns: Patterns, contexts: Sequence[int]) -> str:
    """How far off the figures may be: the worst of what rows held out were predicted wrongly."""
    cells = [
        source.cell(metric, pattern, n)
        for metric in source.metrics
        for _, pattern in patterns
        for n in contexts
    ]
    offs = [cell.off for cell in cells if cell is not None and cell.off is not None]
    if not offs:
        return ""
    return (
        f"Between rows: a time may be off by {max(offs):.0%} at worst (each row predicted from its "
        f"neighbours); where that is over {MOST_OFF:.0%}, or no rows are, it says '{NO_RATE}'."
    )
