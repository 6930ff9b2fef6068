"""Predict what a pattern gains: from measured rates where there are any, else from a roofline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sglang_indexcache.bench import roofline
from sglang_indexcache.bench.errors import BenchError
from sglang_indexcache.bench.layer_stack import LayerStackResult, Phase
from sglang_indexcache.bench.prompts import format_length
from sglang_indexcache.bench.results import LatencyResult, Metric, amdahl, load
from sglang_indexcache.bench.roofline import INDEX_K_BYTES, KV_BYTES, Gpu
from sglang_indexcache.bench.shapes import Shape
from sglang_indexcache.bench.tables import Grid
from sglang_indexcache.pattern import Pattern


class Rates(Protocol):
    """Where predictions come from."""

    source: str
    """In words, beside every prediction."""

    def indexer_share(self, phase: Phase, length: int, requests: int) -> float:
        """Part of the time with every indexer on that the indexers take.

        Raises:
            BenchError: nothing is known there.
        """


class RooflineRates:
    """See :mod:`sglang_indexcache.bench.roofline`."""

    def __init__(self, shape: Shape, gpu: Gpu, kv: str = "fp8", tp: int = 1) -> None:
        if kv not in KV_BYTES:
            raise BenchError(f"the KV cache is {' or '.join(KV_BYTES)}, got {kv!r}")
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

    def __init__(self, result: LayerStackResult, shape: Shape) -> None:
        if result.shape.model_dump(exclude={"name"}) != shape.model_dump(exclude={"name"}):
            raise BenchError(
                f"these rates were measured for {result.shape.name}, another shape than "
                f"{shape.name}"
            )
        self._result = result
        self.source = f"layer stack measured on {result.device} with kernels {result.kernels!r}"

    def indexer_share(self, phase: Phase, length: int, requests: int) -> float:
        """See :class:`Rates`; what an S layer really saves, not what its indexer takes."""
        wanted = (phase, length, requests if phase == "decode" else 1)
        for row in self._result.rows:
            if (row.phase, row.length, row.requests) == wanted:
                return 1 - row.shared_total / row.full_total
        known = sorted({row.length for row in self._result.rows if row.phase == phase})
        raise BenchError(
            f"{phase} at {format_length(length)} was not measured; there are "
            f"{', '.join(map(format_length, known))}"
        )


class ServerRates:
    """A latency benchmark of real servers of the same shape that told their indexers' share."""

    def __init__(self, result: LatencyResult, shape: Shape) -> None:
        ours = {"num_hidden_layers": shape.layers, "hidden_size": shape.hidden}
        if any(result.model.shape.get(name) != value for name, value in ours.items()):
            raise BenchError(f"these rates were measured for another shape than {shape.name}")
        self._result = result
        self.source = f"servers measured with {result.model.name}"

    def indexer_share(self, phase: Phase, length: int, requests: int) -> float:
        """See :class:`Rates`."""
        metric: Metric = "full" if phase == "decode" and requests > 1 else phase
        share = self._result.indexer_share(metric, length)
        if share is None:
            raise BenchError(
                f"these servers did not tell the indexers' share of {metric} at "
                f"{format_length(length)}"
            )
        return share


def read_rates(path: Path, shape: Shape) -> Rates:
    """Rates from a result file of ``bench layer-stack`` or ``bench latency``.

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
        prefill: speed-up.
        decode: speed-up with one request.
        full: speed-up with ``requests`` requests.
        requests: at once, for ``full``.
    """

    pattern: Pattern
    length: int
    prefill: float
    decode: float
    full: float
    requests: int


def predict(
    shape: Shape, rates: Rates, pattern: Pattern, length: int, cache_tokens: int
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
        BenchError: the rates do not cover the length, or not one request fits the cache.
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
    prefill, decode, full = (
        amdahl(rates.indexer_share(phase, length, count), removed) for phase, count in cases
    )
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


def memory(shape: Shape, pattern: Pattern, kv: str) -> Memory:
    """What a token occupies in static mode, where an S layer has no index-K cache."""
    return Memory(
        kv=KV_BYTES[kv] * shape.layers,
        index_k=INDEX_K_BYTES * len(pattern.full_layers),
        index_k_full=INDEX_K_BYTES * shape.layers,
    )


def plan_grid(
    shape: Shape,
    rates: Rates,
    patterns: Sequence[tuple[str, Pattern]],
    lengths: Sequence[int],
    cache_tokens: int,
) -> Grid:
    """Predicted speed-ups over every indexer on, laid out as the paper's Table 1."""
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
    rows: list[tuple[str, ...]] = []
    for title, values in parts:
        rows.append((title,))
        for (name, _), speeds in zip(patterns, values, strict=True):
            rows.append((name, *(f"{speed:.2f}x" for speed in speeds)))
    return Grid(f"predicted speed-up over DSA, {shape.name}: {rates.source}", header, tuple(rows))


def memory_grid(shape: Shape, patterns: Sequence[tuple[str, Pattern]], kv: str) -> Grid:
    """Exact, from the cache layouts."""
    rows = []
    for name, pattern in patterns:
        found = memory(shape, pattern, kv)
        rows.append((name, f"{found.index_k}", f"{found.kv}", f"+{found.tokens_gained:.1%}"))
    header = ("", "index-K bytes a token", f"{kv} KV bytes a token", "KV tokens gained")
    return Grid("memory, all layers", header, tuple(rows))
