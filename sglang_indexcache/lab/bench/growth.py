"""Expected gain for models that nobody has timed with shared selections: MiniMax-M3, DeepSeek-V4.

NVIDIA timed their sparse attention with its indexer only. From 2,048 tokens on attention reads as
many keys whatever the context, so what a layer takes more at a longer one is its indexer's. The
rest of a forward is NVIDIA's own estimate, from the wheel that holds the rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sglang_indexcache.errors import BenchError
from sglang_indexcache.lab.bench.plan import MOST_OFF, Forecast, Gain, Patterns
from sglang_indexcache.lab.bench.results import Metric
from sglang_indexcache.lab.bench.rows import (
    CARDS,
    WHEEL,
    LatencyEstimate,
    Measured,
    Series,
    Wheel,
    consistent,
)
from sglang_indexcache.library import name_and_pattern
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.shapes import find_gpu

CHUNK = 8192
"""Tokens of a prefill chunk, whose rows are read."""
STEADY = 2048
"""Tokens from which on attention reads as many keys: 16 blocks of 128, or 512 entries of 4."""


@dataclass(frozen=True)
class GrowingModel:
    """A model whose rows have the indexer in every layer.

    Attributes:
        name: its name in the rows and to NVIDIA's estimator.
        engine: version of SGLang.
        table: of its attention modules, but for the phase.
        layers: those with an indexer.
        columns: what the rows must have, by column.
        caches: formats of the KV cache, by --kv, the default first.
        caveat: what is not served, or was not run, in words.
    """

    name: str
    engine: str
    table: str
    layers: int
    columns: tuple[tuple[str, Any], ...]
    caches: tuple[tuple[str, str], ...]
    caveat: str


MODELS = {
    "MiniMax-M3": GrowingModel(
        "MiniMaxAI/MiniMax-M3",
        "0.5.16",
        "msa/sglang/0.5.16/msa",
        57,
        (),
        (("bf16", "bfloat16"), ("fp8", "fp8")),
        "MiniMax-M3 has run on no GPU with shared blocks.",
    ),
    "DeepSeek-V4-Flash": GrowingModel(
        "sgl-project/DeepSeek-V4-Flash-FP8",
        "0.5.14",
        "sparse_attention/sglang/0.5.14/dsv4_csa",
        21,
        (("gemm_type", "fp8_block"),),
        (("fp8", "fp8_e4m3"),),
        "DeepSeek-V4 is not served with shared selections here.",
    ),
}
"""Models by the name that a user gives, in any case."""

Whole = Callable[[str, int, int], float]
"""Milliseconds of a forward by phase, requests (a step) or tokens (a chunk), and context."""


def find(model: str) -> GrowingModel | None:
    """Return the model by a user's name for it, behind any organisation; None for others."""
    key = model.rpartition("/")[2].lower().removesuffix("-fp8")
    return next((row for name, row in MODELS.items() if name.lower() == key), None)


class GrowthForecast(Forecast):
    """The gain of sharing over every indexer, composed: a lower bound by the rows' growth.

    Args:
        gpu: a name of :data:`~sglang_indexcache.lab.bench.rows.CARDS`.
        gpus: of the server, all in one tensor-parallel group.
        kv: format of the KV cache, of the model's ``caches``; its default if empty.
        data: folder of the rows, if not the installed wheel's.
        whole: stands for NVIDIA's estimator of whole forwards.

    Raises:
        BenchError: no rows of this deployment, or the wheel is not installed.
    """

    base = "every indexer, composed"

    def __init__(
        self,
        model: GrowingModel,
        gpu: str,
        gpus: int,
        kv: str = "",
        data: Path | None = None,
        whole: Whole | None = None,
    ) -> None:
        caches = dict(model.caches)
        kv = kv or model.caches[0][0]
        if kv not in caches:
            raise BenchError(f"the KV cache of {model.name}'s rows is {' or '.join(caches)}")
        self.model, self.gpus, self.card = model, gpus, find_gpu(gpu).name
        self.title = f"{model.name}, {gpus} x {self.card}, --tp {gpus}, {kv} cache"
        wheel = Wheel(gpu, data)
        columns = {
            **dict(model.columns), "model": model.name, "tp_size": gpus,
            "kv_cache_dtype": caches[kv],
        }  # fmt: skip
        self._chunks = self._read(wheel, "context", {**columns, "batch_size": 1, "isl": CHUNK})
        self._steps = self._read(wheel, "generation", {**columns, "batch_size": 1})
        self._whole = cache(whole or _estimator(model, CARDS[gpu], gpus, kv))

    def _read(self, wheel: Wheel, phase: str, columns: dict[str, Any]) -> Series:
        """Return the layer's time by tokens before it, without rows that contradict longer ones."""
        latencies: Measured = defaultdict(lambda: defaultdict(list))
        for row in wheel.rows(f"{self.model.table}_{phase}_module_perf", columns):
            if row["step"] >= STEADY:
                latencies["F", 1][row["step"]].append(row["latency"])
        series, _ = consistent(latencies)
        if not series or STEADY not in series["F", 1].points:
            raise BenchError(f"NVIDIA measured no layers of {self.title}")
        return series["F", 1]

    @property
    def sources(self) -> tuple[str, ...]:
        """Sources of all parts, in sentences."""
        return (
            f"{self.model.caveat} These are sums, measured nowhere: what sharing would gain.",
            f"Indexers: what NVIDIA's rows of SGLang {self.model.engine} on {self.card} ({WHEEL}) "
            f"grow by from {STEADY:,} tokens on, in {self.model.layers} layers; what an indexer "
            "takes below counts as attention, so gains are a lower bound.",
            f"The whole forward: NVIDIA's estimator in the same wheel, chunks of {CHUNK:,} tokens. "
            "Quality is another question: no pattern of this model has been judged.",
            "How many requests a cache holds is not known here.",
        )

    def gain(self, metric: Metric, pattern: Pattern, context: int) -> Gain | None:
        """Return a pattern's gain for one request of ``context`` tokens.

        None for "full" (the cache's requests are not known), beyond the rows, and where the rows'
        own error is above :data:`MOST_OFF`.
        """
        if metric == "full":
            return None
        if metric == "decode":
            indexer, whole = self._growth(self._steps, context), self._whole("step", 1, context)
        else:
            indexer, whole = LatencyEstimate(0.0), 0.0
            for prefix in range(0, context, CHUNK):
                tokens = min(CHUNK, context - prefix)
                growth = self._growth(self._chunks, prefix)
                if growth is None:
                    return None
                indexer += LatencyEstimate(growth.value * tokens / CHUNK, growth.off)
                whole += self._whole("chunk", tokens, prefix + tokens)
        if indexer is None:
            return None
        saved = indexer * (len(pattern) - len(pattern.full_layers))
        off = saved.off * saved.value / (whole - saved.value)
        return Gain(whole, whole / (whole - saved.value), off) if off <= MOST_OFF else None

    @staticmethod
    def _growth(series: Series, tokens: int) -> LatencyEstimate | None:
        """Return what one layer takes more behind ``tokens`` than at :data:`STEADY`."""
        late = series.at(max(tokens, STEADY))
        if late is None:
            return None
        growth = max(0.0, late.value - series.points[STEADY])
        return LatencyEstimate(growth, late.off * late.value / growth if growth else 0.0)

    def patterns(self, values: Sequence[str]) -> Patterns:
        """Return patterns over the layers with an indexer: a ratio, evenly spaced, or letters."""
        count = self.model.layers
        patterns: list[tuple[str, Pattern]] = []
        for name, value in map(name_and_pattern, values):
            letters = set(value) <= {"F", "S"}
            pattern = Pattern(value) if letters else Pattern.uniform(count, _ratio(value))
            if len(pattern) != count:
                raise BenchError(f"{self.model.name} has {count} indexers, not {len(pattern)}")
            patterns.append((name, pattern))
        return patterns


def _ratio(value: str) -> int:
    text = value.removeprefix("uniform:")
    if text == "full":
        return 1
    if not text.startswith("1/") or not text[2:].isdecimal() or int(text[2:]) < 1:
        raise BenchError(
            f"{value!r}: no pattern of this model is known; give 1/4, or F and S "
            "(folding is composed for GLM-5 only)"
        )
    return int(text[2:])


def _estimator(model: GrowingModel, card: str, gpus: int, kv: str) -> Whole:
    """Return NVIDIA's estimate of a forward with every indexer, its layers' rows in it."""
    from aiconfigurator_core.sdk import common, models, perf_database
    from aiconfigurator_core.sdk.backends.factory import get_backend
    from aiconfigurator_core.sdk.config import ModelConfig, RuntimeConfig

    layout = ModelConfig(tp_size=gpus, moe_tp_size=gpus, moe_ep_size=1)
    if len(model.caches) > 1:
        layout.kvcache_quant_mode = getattr(
            common.KVCacheQuantMode, {"bf16": "bfloat16", "fp8": "fp8"}[kv]
        )
    database = perf_database.get_database(card, "sglang", model.engine)
    if database is None:
        raise BenchError(f"{WHEEL} has no rows of SGLang {model.engine} on {card}")
    built, backend = models.get_model(model.name, layout, "sglang"), get_backend("sglang")

    def whole(phase: str, count: int, context: int) -> float:
        if phase == "chunk":
            settings = RuntimeConfig(batch_size=1, isl=context, osl=1, prefix=context - count)
        else:
            settings = RuntimeConfig(batch_size=count, isl=context, osl=2)
        mode = "static_ctx" if phase == "chunk" else "static_gen"
        return float(backend.run_static_latency_only(built, database, settings, mode))

    return whole
