"""Predict what a pattern gains: from measured rates where there are any, else from a roofline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sglang_indexcache.bench import roofline
from sglang_indexcache.bench.layer_stack import LayerStackResult, Phase
from sglang_indexcache.bench.results import LatencyResult, Metric, amdahl, load, removed_share
from sglang_indexcache.bench.roofline import INDEX_K_BYTES, KV_BYTES, Gpu
from sglang_indexcache.bench.shapes import ModelShape, checkpoint_of
from sglang_indexcache.bench.tables import NOT_MEASURED, Grid
from sglang_indexcache.errors import BenchError
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.support.lengths import format_length


class Rates(Protocol):
    """Where predictions come from.

    Attributes:
        source: in words, beside every prediction.
        note: what else a reader must know; may be empty.
    """

    source: str
    note: str

    def indexer_share(self, phase: Phase, length: int, requests: int) -> float | None:
        """Part of the time with every indexer on that the indexers take; None if not known."""


class RooflineRates:
    """See :mod:`sglang_indexcache.bench.roofline`."""

    note = (
        "Prefill: published rates of DeepGEMM and FlashMLA, the rest assumed. Decode: memory "
        "traffic and launches only; a real server's step takes longer and gains more from sharing "
        "(30B model on H100 at 200K, 1/4: 1.2x here, 1.48x in the paper)."
    )

    def __init__(self, shape: ModelShape, gpu: Gpu, kv: str = "fp8", tp: int = 1) -> None:
        if kv not in KV_BYTES:
            raise BenchError(f"the KV cache is {' or '.join(KV_BYTES)}, got {kv!r}")
        if tp < 1:
            raise BenchError(f"tensor parallelism has at least one rank, got {tp}")
        self._shape, self._gpu, self._kv, self._tp = shape, gpu, kv, tp
        self.source = f"roofline of {gpu.name}, not a measurement"

    def indexer_share(self, phase: Phase, length: int, requests: int) -> float:
        """See :class:`Rates`."""
        shape, gpu = self._shape, self._gpu
        if phase == "prefill":
            one, rest = roofline.prefill_layer(shape, gpu, length, self._tp), 0.0
        else:
            one = roofline.decode_layer(shape, gpu, length, requests, self._kv, self._tp)
            rest = roofline.head_seconds(shape, gpu, self._tp)
        return shape.layers * one.indexer / (shape.layers * one.full + rest)


class StackRates:
    """A layer-stack measurement of the same shape."""

    note = "Without the embedding, the output projection, a scheduler and other GPUs."

    def __init__(self, result: LayerStackResult, shape: ModelShape) -> None:
        if result.shape.model_dump(exclude={"name"}) != shape.model_dump(exclude={"name"}):
            raise BenchError(
                f"these rates were measured for {result.shape.name}, another shape than "
                f"{shape.name}"
            )
        self._result = result
        self.source = f"layer stack measured on {result.device} with kernels {result.kernels!r}"

    def indexer_share(self, phase: Phase, length: int, requests: int) -> float | None:
        """See :class:`Rates`; what an S layer really saves, not what its indexer takes."""
        wanted = (phase, length, requests if phase == "decode" else 1)
        for row in self._result.rows:
            if (row.phase, row.length, row.requests) == wanted:
                return 1 - row.shared_total / row.full_total
        return None


class ServerRates:
    """A latency benchmark of real servers of the same shape, all F among them.

    The share is what the all-F servers told (CPU platform); on a GPU it is solved from the measured
    speed-up of the pattern with the fewest F layers. "Full" is the measured servers' own KV cache.
    """

    def __init__(self, result: LatencyResult, shape: ModelShape) -> None:
        ours = checkpoint_of(shape).shape
        measured = result.model.shape
        if any(measured.get(name) != value for name, value in ours.items()):
            raise BenchError(f"these rates were measured for another shape than {shape.name}")
        if result.baseline.parsed.shared_layers:
            raise BenchError(
                f"the baseline of these rates is {result.baseline.name}, not the full pattern"
            )
        self._result = result
        self._sparsest = min(result.configurations, key=lambda c: len(c.parsed.full_layers))
        self.source = f"servers measured with {result.model.name}"
        self.note = f"KV cache of {result.visits[0].facts.capacity} tokens a rank, as measured."

    def indexer_share(self, phase: Phase, length: int, requests: int) -> float | None:
        """See :class:`Rates`."""
        metric: Metric = "full" if phase == "decode" and requests > 1 else phase
        if metric not in self._result.metrics or length not in self._result.lengths:
            return None
        told = self._result.indexer_share(metric, length)
        return self._solved(metric, length) if told is None else told

    def _solved(self, metric: Metric, length: int) -> float | None:
        """The share that Amdahl's law needs for the measured speed-up."""
        removed = removed_share(self._result.baseline.parsed, self._sparsest.parsed)
        if not removed:
            return None
        speed = self._result.speedup(self._sparsest.name, metric, length).median
        return (1 - 1 / speed) / removed


def read_rates(path: Path, shape: ModelShape) -> Rates:
    """Rates from a result file of ``bench latency`` or of ``python -m benchmarks.stack``.

    Raises:
        BenchError: it is neither, or for another shape.
    """
    if not path.exists():
        raise BenchError(f"cannot read {path}")
    if '"kind": "layer-stack"' in path.read_text(encoding="utf-8"):
        return StackRates(load(LayerStackResult, path), shape)
    return ServerRates(load(LatencyResult, path), shape)


@dataclass(frozen=True)
class Prediction:
    """What one pattern gains at one context.

    Attributes:
        pattern: F/S.
        length: tokens.
        prefill: speed-up; None, here and below, where the rates know nothing.
        decode: speed-up with one request.
        full: speed-up with ``requests`` requests.
        requests: at once, for ``full``.
    """

    pattern: Pattern
    length: int
    prefill: float | None
    decode: float | None
    full: float | None
    requests: int


def predict(
    shape: ModelShape, rates: Rates, pattern: Pattern, length: int, cache_tokens: int
) -> Prediction:
    """Amdahl's law on the rates.

    Args:
        shape: of the model.
        rates: where from.
        pattern: to serve with.
        length: tokens of context.
        cache_tokens: that the KV cache of a GPU holds, for the full-cache figure.

    Raises:
        PatternError: a pattern of another length.
        BenchError: not one request fits the cache.
    """
    pattern.check_length(shape.layers)
    requests = cache_tokens // length
    if requests < 1:
        raise BenchError(
            f"a KV cache of {format_length(cache_tokens)} tokens holds no request of "
            f"{format_length(length)}"
        )
    removed = len(pattern.shared_layers) / shape.layers
    cases: tuple[tuple[Phase, int], ...] = (("prefill", 1), ("decode", 1), ("decode", requests))
    shares = [rates.indexer_share(phase, length, count) for phase, count in cases]
    prefill, decode, full = (None if share is None else amdahl(share, removed) for share in shares)
    return Prediction(pattern, length, prefill, decode, full, requests)


@dataclass(frozen=True)
class Memory:
    """Bytes of one token over all layers.

    Attributes:
        kv: latent rows.
        index_k: index keys of the F layers.
        index_k_full: of all layers.
    """

    kv: int
    index_k: int
    index_k_full: int

    @property
    def tokens_gained(self) -> float:
        """Additional tokens in the same memory, as a part of those without sharing."""
        return (self.kv + self.index_k_full) / (self.kv + self.index_k) - 1


def memory(shape: ModelShape, pattern: Pattern, kv: str) -> Memory:
    """What a token occupies in static mode, where an S layer has no index-K cache."""
    return Memory(
        kv=KV_BYTES[kv] * shape.layers,
        index_k=INDEX_K_BYTES * len(pattern.full_layers),
        index_k_full=INDEX_K_BYTES * shape.layers,
    )


def plan_grid(
    shape: ModelShape,
    rates: Rates,
    patterns: Sequence[tuple[str, Pattern]],
    lengths: Sequence[int],
    cache_tokens: int,
) -> Grid:
    """Predicted speed-ups over every indexer on, laid out as the paper's Table 1.

    Raises:
        BenchError: the rates cover none of the contexts; else as :func:`predict`.
    """
    header = ("", *map(format_length, lengths))
    found = {
        name: [predict(shape, rates, pattern, length, cache_tokens) for length in lengths]
        for name, pattern in patterns
    }
    parts = (
        ("Prefill", [[p.prefill for p in found[name]] for name, _ in patterns]),
        ("Decode, one request", [[p.decode for p in found[name]] for name, _ in patterns]),
        ("Decode, full KV cache", [[p.full for p in found[name]] for name, _ in patterns]),
    )
    if all(speed is None for _, values in parts for speeds in values for speed in speeds):
        raise BenchError(
            f"{rates.source}: nothing was measured at {', '.join(map(format_length, lengths))}; "
            "choose a measured length with --context"
        )
    rows: list[tuple[str, ...]] = []
    for title, values in parts:
        rows.append((title,))
        for (name, _), speeds in zip(patterns, values, strict=True):
            rows.append((name, *map(_cell, speeds)))
    return Grid(f"predicted speed-up over DSA, {shape.name}: {rates.source}", header, tuple(rows))


def _cell(speed: float | None) -> str:
    return NOT_MEASURED if speed is None else f"{speed:.2f}x"


def memory_grid(shape: ModelShape, patterns: Sequence[tuple[str, Pattern]], kv: str) -> Grid:
    """Exact, from the cache layouts of a GPU in static mode."""
    rows = []
    for name, pattern in patterns:
        found = memory(shape, pattern, kv)
        rows.append((name, f"{found.index_k}", f"{found.kv}", f"+{found.tokens_gained:.1%}"))
    header = ("", "index-K bytes a token", f"{kv} KV bytes a token", "KV tokens gained")
    return Grid("memory, all layers", header, tuple(rows))
