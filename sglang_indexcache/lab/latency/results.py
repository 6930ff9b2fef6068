"""Record of a latency benchmark, and the figures that follow from it.

Only samples are stored. Medians and speed-ups are computed from them, so that no table can disagree
with its file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from pydantic import Field

from sglang_indexcache.checkpoint import Checkpoint
from sglang_indexcache.errors import BenchError
from sglang_indexcache.library.files import Strict
from sglang_indexcache.library.resolve import Library, names_and_patterns
from sglang_indexcache.pattern import Pattern

Metric = Literal["prefill", "decode", "full"]

METRICS: dict[Metric, str] = {
    "prefill": "Prefill time (s)",
    "decode": "Decode throughput, per request (tok/s)",
    "full": "Decode throughput, full KV cache (tok/s)",
}
"""The paper's three metrics (Table 1), in its order. The paper's throughput is per GPU, which is a
data-parallel rank there; ours is per rank."""


class Environment(Strict):
    """Machine and software of one measurement: see ``runs.provenance.machine``."""

    date: str
    cpu: str
    cores: int
    gpus: tuple[str, ...]
    versions: dict[str, str]
    commit: str
    load_before: float


class Configuration(Strict):
    """One way to serve: ``value`` is the pattern as the user wrote it, ``pattern`` its letters."""

    name: str
    value: str
    pattern: str

    @property
    def parsed(self) -> Pattern:
        """The pattern as a value."""
        return Pattern(self.pattern)


def configurations(values: Sequence[str], checkpoint: Checkpoint) -> tuple[Configuration, ...]:
    """Resolve the user's patterns, with or without ``NAME=`` before them.

    Raises:
        IndexCacheError: a pattern does not fit, or a name occurs twice.
    """
    resolved = []
    for name, value in names_and_patterns(values):
        pattern = Library.default().resolve(value, checkpoint).pattern
        resolved.append(Configuration(name=name, value=value, pattern=str(pattern)))
    return tuple(resolved)


class Model(Strict):
    """Model that was served.

    ``digest`` is ``library.digest.checkpoint_digest``, empty without the weights; ``note`` may say,
    for example, that the weights are random.
    """

    name: str
    architecture: str
    digest: str
    shape: dict[str, int | None]
    note: str = ""


class ServerFacts(Strict):
    """Facts that a server reports about itself.

    Attributes:
        device: "cuda" or "cpu".
        dp: number of data-parallel ranks, each with its own KV cache and request.
        chunked_prefill: tokens in a prefill chunk.
        page: tokens in a page.
        capacity: KV tokens of each rank.
        index_k_bytes: bytes of index keys per token on one rank.
        mode: "static" or "live". Files older than this field are from static servers.
    """

    device: str
    tp: int
    dp: int
    dp_attention: bool
    chunked_prefill: int
    page: int
    capacity: int
    index_k_bytes: int
    mode: str = "static"


class Visit(Strict):
    """One server during one round, counted from 0.

    ``busy_cores`` is the foreign work just before the visit, in cores; None if unknown.
    """

    configuration: str
    round: int
    facts: ServerFacts
    busy_cores: float | None


class LatencySample(Strict):
    """One measurement.

    Attributes:
        length: number of prompt tokens.
        value: for prefill, seconds as the median over the ranks' requests; for decode, tokens per
            second of one request (median); for full, tokens per second of one rank.
        requests: number sent at once, to all ranks together.
        indexer_share: share of this metric's time in indexers, if the server reports it (CPU
            platform).
    """

    configuration: str
    round: int
    length: int
    metric: Metric
    value: float = Field(gt=0)
    requests: int = Field(ge=1)
    indexer_share: float | None = None


@dataclass(frozen=True)
class Speedup:
    """One configuration against the baseline, over the rounds.

    It has the median, lowest and highest of the rounds' ratios; above 1 is faster. ``ideal`` is the
    speed-up by Amdahl's law if the removed indexers' share of the baseline's time costs nothing;
    None if that share is unknown.
    """

    median: float
    low: float
    high: float
    ideal: float | None


class LatencyResult(Strict):
    """One run of ``indexcache bench latency``.

    Attributes:
        environment: the client's environment; servers that the benchmark starts run on the same
            machine.
        side_by_side: whether the servers ran at once, so that a turn was one request per rank, or
            as many as the KV cache holds, and not all lengths.
        started_here: whether the benchmark started the servers; if not, they may run on another
            machine than ``environment`` describes, with flags that ``arguments`` does not have.
        configurations: all configurations; the first is the baseline.
        lengths: numbers of prompt tokens.
        clock: a field of the files with only one value.
        visits: one server start with all lengths, or, side by side, one turn.
        samples: everything measured, without warm-up.
    """

    kind: Literal["latency"] = "latency"
    environment: Environment
    side_by_side: bool
    started_here: bool = True
    model: Model
    arguments: tuple[str, ...]
    configurations: tuple[Configuration, ...] = Field(min_length=1)
    lengths: tuple[int, ...]
    new_tokens: int
    clock: Literal["wall"] = "wall"
    rounds: int
    visits: tuple[Visit, ...]
    samples: tuple[LatencySample, ...]

    @property
    def baseline(self) -> Configuration:
        """Configuration with which the others are compared."""
        return self.configurations[0]

    @property
    def on_gpu(self) -> bool:
        """Whether the server ran on a GPU, so that absolute figures may be shown."""
        return all(visit.facts.device == "cuda" for visit in self.visits)

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Metrics that were measured, in the paper's order."""
        measured = {sample.metric for sample in self.samples}
        return tuple(metric for metric in METRICS if metric in measured)

    def values(self, configuration: str, metric: Metric, length: int) -> dict[int, float]:
        """Return the median value of each round."""
        rounds: dict[int, list[float]] = {}
        for sample in self._matching(configuration, metric, length):
            rounds.setdefault(sample.round, []).append(sample.value)
        return {number: median(values) for number, values in rounds.items()}

    def indexer_share(self, metric: Metric, length: int) -> float | None:
        """Return the share of the baseline's time in indexers, as the median over rounds."""
        shares = self.indexer_shares(metric, length)
        return median(shares) if shares else None

    def indexer_shares(self, metric: Metric, length: int) -> list[float]:
        """Return the indexers' share in each round in which it is known."""
        samples = self._matching(self.baseline.name, metric, length)
        return [s.indexer_share for s in samples if s.indexer_share is not None]

    def speedup(self, configuration: str, metric: Metric, length: int) -> Speedup:
        """Compare ``configuration`` with the baseline of the same round.

        Raises:
            BenchError: one of the two was not measured.
        """
        values = self.values(configuration, metric, length)
        base_values = self.values(self.baseline.name, metric, length)
        if not values or values.keys() != base_values.keys():
            raise BenchError(f"{configuration} has no {metric} at {length} tokens in every round")
        pairs = [(values[number], base_values[number]) for number in values]
        ratios = [base / ours if metric == "prefill" else ours / base for ours, base in pairs]
        share = self.indexer_share(metric, length)
        pattern = next(c for c in self.configurations if c.name == configuration).parsed
        removed = 1 - len(pattern.full_layers) / len(self.baseline.parsed.full_layers)
        ideal = None if share is None else 1 / (1 - share * removed)
        return Speedup(median(ratios), min(ratios), max(ratios), ideal)

    def _matching(self, configuration: str, metric: Metric, length: int) -> list[LatencySample]:
        key = (configuration, metric, length)
        return [s for s in self.samples if (s.configuration, s.metric, s.length) == key]
