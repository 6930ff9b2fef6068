"""Expected gain of a pattern on a deployment, before it is rented (``indexcache bench plan``).

A whole forward is composed from measured rows of its parts: a layer is its attention module
(:mod:`.rows`: with the indexer in an F layer, without it in an S layer), two all-reduces, two norms
and the experts, or a dense MLP in the first layers. A prompt is a sum over its chunks, as SGLang
cuts it. Left out are what the scheduler adds between two steps, sampling, and the tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from sglang_indexcache.checkpoint import (
    INDEX_K_BYTES_PER_KEY,
    Checkpoint,
    fp8_blocks,
    read_config,
    text_config,
)
from sglang_indexcache.errors import BenchError, LibraryError
from sglang_indexcache.lab.latency.results import METRICS, Metric
from sglang_indexcache.lab.latency.row_split import (
    NCCL,
    WAYS,
    Chunks,
    ContextParallelLayers,
    RowSplitLayers,
    Way,
)
from sglang_indexcache.lab.latency.rows import ENGINE, KINDS, LatencyEstimate, Layers, Series, Wheel
from sglang_indexcache.lab.latency.tables import Grid
from sglang_indexcache.library.lengths import format_length
from sglang_indexcache.library.resolve import Library, Resolved, name_and_pattern
from sglang_indexcache.library.sizes import (
    PRESETS,
    USED_MEMORY,
    ModelShape,
    check_room,
    checkpoint_of,
    find_gpu,
)
from sglang_indexcache.pattern import Pattern

NO_RATE = "no rate for this"
MOST_OFF = 0.1
"""A figure that may be off by more is not given: "no rate for this"."""
EXPERT_LOADS = "power_law_1.01"
"""How uneven the rows' tokens load the experts: what NVIDIA's own estimator takes."""
MEMORY_PART = 0.8
"""Share of the bandwidth that a norm reaches: an assumption."""
TOLD_OFF = 0.02
"""Retention by which a pattern may miss the ratio that it is called by without a note."""
KV_BYTES = {"fp8": 656, "bf16": 1152}
"""Bytes of a token's latent row (FlashMLA's FP8 format; 576 bfloat16)."""


@dataclass(frozen=True)
class MeasuredModel:
    """A model whose layers the rows have.

    Attributes:
        shape: a name of :data:`.shapes.PRESETS`.
        full: the model of the F layers' rows.
        shared: that of the S layers' rows.
        weights: format of the weights, as the rows name it.
        note: what stands for what.
    """

    shape: str
    full: str
    shared: str
    weights: str
    note: str = ""


_GLM = "GLM-5.2 has GLM-5's shape and was measured with and without indexers."
MODELS = {
    "GLM-5-FP8": MeasuredModel(
        "glm-5", "zai-org/GLM-5-FP8", "zai-org/GLM-5.2-FP8", "fp8_block", note=_GLM
    ),
    "GLM-5": MeasuredModel("glm-5", "zai-org/GLM-5", "zai-org/GLM-5.2", "bfloat16", note=_GLM),
    "DeepSeek-V3.2": MeasuredModel(
        "deepseek-v3.2",
        "deepseek-ai/DeepSeek-V3.2",
        "zai-org/GLM-5.2-FP8",
        "fp8_block",
        note="No S layer of DeepSeek-V3.2 was measured: GLM-5.2's with as many heads on a rank "
        "stands for it. Its projections are larger, so the gains are a lower bound.",
    ),
}
"""Models by the name that a user gives, in any case."""


@dataclass(frozen=True)
class Deployment:
    """Deployment that serves a model.

    Attributes:
        model: a name of :data:`MODELS`.
        gpu: a name of :data:`.shapes.GPUS`.
        dp: ranks of data-parallel attention; 1 is tensor parallelism over all GPUs.
        kv: of the latent cache, "fp8" or "bf16"; "" is the engine's default on that GPU.
    """

    model: str
    gpu: str
    gpus: int = 8
    dp: int = 1
    kv: str = ""

    def __post_init__(self) -> None:
        """Raise BenchError on a deployment that cannot be."""
        if self.gpus < 1 or self.dp < 1 or self.gpus % self.dp:
            raise BenchError(
                f"data-parallel attention shares the GPUs evenly: {self.dp} ranks, {self.gpus} GPUs"
            )
        if self.cache not in KV_BYTES:
            raise BenchError(f"the KV cache is {' or '.join(KV_BYTES)}, got {self.kv!r}")
        find_gpu(self.gpu)

    @property
    def measured(self) -> MeasuredModel:
        """Model whose rows are its layers'."""
        return MODELS[self.model]

    @property
    def shape(self) -> ModelShape:
        """Dimensions of the model."""
        return PRESETS[self.measured.shape]

    @property
    def cache(self) -> str:
        """The KV cache's format: SGLang takes FP8 on Blackwell and bfloat16 on Hopper."""
        return self.kv or ("fp8" if self.gpu == "b200" else "bf16")

    @property
    def chunk(self) -> int:
        """Tokens of a rank's prefill chunk: SGLang's default, by memory, shared by the ranks."""
        return (16384 if find_gpu(self.gpu).memory > 160e9 else 8192) // self.dp

    @property
    def weight_bytes(self) -> float:
        """Weights on one GPU; attention's are repeated in each rank of data-parallel attention."""
        size = 1 if "fp8" in self.measured.weights else 2
        return self.shape.weight_bytes(self.gpus, self.dp, size)

    @property
    def cache_tokens(self) -> int:
        """Cache tokens of a rank beside the weights, every layer F; negative if they do not fit."""
        room = USED_MEMORY * find_gpu(self.gpu).memory - self.weight_bytes
        bytes_per_layer = KV_BYTES[self.cache] + INDEX_K_BYTES_PER_KEY
        return int(room / (self.shape.num_hidden_layers * bytes_per_layer))

    def __str__(self) -> str:
        ranks = f"--tp {self.gpus}" + (
            f" --dp {self.dp} --enable-dp-attention" if self.dp > 1 else ""
        )
        return f"{self.model}, {self.gpus} x {find_gpu(self.gpu).name}, {ranks}, {self.cache} cache"

    def check_fits(self) -> None:
        """Raise BenchError if the weights leave no room for a cache."""
        gpu = find_gpu(self.gpu)
        check_room(self.model, self.weight_bytes, self.gpus, self.dp, gpu.name, gpu.memory)


@dataclass(frozen=True)
class Gain:
    """Gain of a pattern over every indexer.

    Attributes:
        milliseconds: of a prompt or a step with every indexer.
        gain: that time over the pattern's.
        off: share by which either may be wrong.
        requests: of the step, on each rank.
    """

    milliseconds: float
    gain: float
    off: float
    requests: int = 1


class Forwards:
    """The time of whole forwards, and what patterns gain on it.

    Attributes:
        title: the deployment, in words.

    Attributes:
        ways: in which ranks share the rows of a prefill.

    Raises:
        BenchError: no rows of this deployment, or the wheel is not installed.
    """

    def __init__(self, deployment: Deployment, data: Path | None = None) -> None:
        self.title = str(deployment)
        self.deployment, self._shape = deployment, deployment.shape
        self._wheel = Wheel(deployment.gpu, data)
        names, gpus = deployment.measured, deployment.gpus
        self.layers = self._read_layers(self._shape.num_attention_heads // (gpus // deployment.dp))
        self._experts = self._wheel.series(
            f"moe/{ENGINE}/moe_perf",
            "num_tokens",
            {
                "hidden_size": self._shape.hidden_size,
                "inter_size": self._shape.moe_intermediate_size,
                "topk": self._shape.num_experts_per_tok,
                "num_experts": self._shape.n_routed_experts,
                "moe_dtype": names.weights, "moe_tp_size": gpus, "moe_ep_size": 1,
                "distribution": EXPERT_LOADS,
            },
        )  # fmt: skip
        self._reduce = {
            graph: self._wheel.series(
                f"comm/{ENGINE}/custom_allreduce_perf",
                "message_size",
                {"num_gpus": gpus, "backend": "sglang_graph" if graph else "sglang_eager"},
            )
            if gpus > 1
            else None
            for graph in (True, False)
        }
        self.ways: dict[Way, Chunks] = {}
        self._product = cache(self._find_product)
        self._around = cache(self._time_around)

    def _read_layers(self, heads: int) -> Layers:
        names = self.deployment.measured
        kv = {"fp8": "fp8", "bf16": "bfloat16"}[self.deployment.cache]
        return self._wheel.layers(names.full, names.shared, heads, names.weights, kv)

    @property
    def sources(self) -> tuple[str, ...]:
        """Sources of all parts, in sentences."""
        name = find_gpu(self.deployment.gpu).name
        prompt, context = self.layers.reach(self.deployment.chunk)
        sentences = [
            f"Attention: {self.layers.source}. They reach prompts of {prompt:,} tokens in chunks "
            f"of {self.deployment.chunk:,}, and contexts of {context:,} in decode.",
            f"Experts, products, all-reduce: rows of the same engine and card; experts loaded by "
            f"{EXPERT_LOADS}. Norms: bytes over {MEMORY_PART:.0%} of {name}'s bandwidth.",
            "Not counted: the scheduler between two steps, sampling; and MTP, whose verification "
            "asks for several tokens of a request at once, of which there are no rows.",
        ]
        if self.deployment.dp > 1:
            sentences.insert(2, "Gather and scatter of the ranks' tokens count as two all-reduces.")
        for way in self.ways:
            sentences.append(WAYS[way])
        sentences.append(self.deployment.measured.note)
        if self.contradictions:
            sentences.append(
                f"Rows that contradict others, left out: {'; '.join(self.contradictions)}."
            )
        return tuple(sentences)

    @property
    def contradictions(self) -> tuple[str, ...]:
        """Rows that were left out of what is used here: full chunks, and contexts beyond top-k."""
        rows = [
            row
            for row in self.layers.contradictions
            if row.x >= self._shape.index_topk
            and (row.phase == "generation" or row.size == self.deployment.chunk)
        ]
        return tuple(row.text for row in rows)

    def deal_out(self, *ways: Way) -> None:
        """Add ways in which ranks share the rows of a prefill.

        Raises:
            BenchError: there is one rank a replica, or no rows of all heads.
        """
        deployment, shape = self.deployment, self._shape
        ranks = deployment.gpus // deployment.dp
        if not ways:
            return
        if ranks == 1:
            raise BenchError(
                f"{' and '.join(ways)}: each replica of {deployment} has one rank, which has all "
                "rows. Plan with fewer replicas (--dp)."
            )
        gather = self._wheel.series(
            NCCL,
            "message_size",
            {"op_name": "all_gather", "nccl_dtype": "int8", "num_gpus": ranks},
        )
        if "row split" in ways:
            width = shape.index_n_heads * shape.index_head_dim
            self.ways["row split"] = RowSplitLayers(
                self.layers,
                ranks,
                gather,
                4 * shape.index_topk,
                lambda rows: self._product(
                    rows, width, shape.q_lora_rank, deployment.measured.weights
                ),
            )
        if "prefill CP" in ways:
            layers = self._read_layers(shape.num_attention_heads)
            self.ways["prefill CP"] = ContextParallelLayers(
                layers, ranks, gather, KV_BYTES[deployment.cache]
            )

    def gain(
        self, metric: Metric, pattern: Pattern, context: int, way: Way | None = None
    ) -> Gain | None:
        """Return a pattern's gain; None where nothing is known, or what is may be too far off.

        It is over every indexer on every rank, by whichever ``way`` a prefill's rows are dealt out.
        """
        requests = self.requests(context) if metric == "full" else 1
        counts = (len(pattern), len(pattern.full_layers))
        if metric == "prefill":
            full = self.prefill(len(pattern), context)
            mine = self.prefill(len(pattern.full_layers), context, way)
        else:
            full, mine = (self.decode(count, requests, context) for count in counts)
        if full is None or mine is None or max(full.off, mine.off) > MOST_OFF:
            return None
        off = max(full.off, mine.off)
        return Gain(full.value, full.value / mine.value, off, requests)

    def describe_range(self, patterns: Iterable[Pattern], contexts: Sequence[int]) -> str:
        """Say how far off gains may be: the worst error of rows predicted without themselves."""
        gains = [
            self.gain(metric, pattern, n)
            for metric in METRICS
            for pattern in patterns
            for n in contexts
        ]
        offs = [gain.off for gain in gains if gain is not None]
        if not offs:
            return ""
        return (
            f"Between rows: a time may be off by {max(offs):.0%} at worst (each row predicted from "
            f"its neighbours); where that is over {MOST_OFF:.0%}, or no rows are, it says "
            f"'{NO_RATE}'."
        )

    def prefill(
        self, full_layers: int, context: int, way: Way | None = None
    ) -> LatencyEstimate | None:
        """Return milliseconds to read a prompt, one on each rank; None where rows are missing."""
        total = LatencyEstimate(0.0)
        layers = self.layers if way is None else self.ways[way]
        shared_layers = self._shape.num_hidden_layers - full_layers
        for prefix in range(0, context, self.deployment.chunk):
            tokens = min(self.deployment.chunk, context - prefix)
            chunk = _sum(
                [
                    (full_layers, layers.chunk("F", tokens, prefix)),
                    (shared_layers, layers.chunk("S", tokens, prefix)),
                    (1, self._around(tokens * self.deployment.dp, self.deployment.dp, False)),
                ]
            )
            if chunk is None:
                return None
            total += chunk
        return total

    def decode(self, full_layers: int, requests: int, context: int) -> LatencyEstimate | None:
        """Return milliseconds of a step of ``requests`` requests on each rank; None as above."""
        full, shared = (self.layers.step(kind, requests, context) for kind in KINDS)
        tokens = requests * self.deployment.dp
        shared_layers = self._shape.num_hidden_layers - full_layers
        around = self._around(tokens, tokens, True)
        return _sum([(full_layers, full), (shared_layers, shared), (1, around)])

    def requests(self, context: int) -> int:
        """Return the largest batch of a rank that its cache holds and the rows know."""
        largest = self.layers.largest_batch(context)
        room = self.deployment.cache_tokens
        return max(1, min(largest, room // context)) if room > 0 else largest

    def _time_around(self, tokens: int, heads: int, graph: bool) -> LatencyEstimate | None:
        """Time all but attention: ``tokens`` of all ranks, ``heads`` of them to the vocabulary."""
        shape, gpus, names = self._shape, self.deployment.gpus, self.deployment.measured
        experts = self._experts.at(tokens)
        reduce = self._reduce[graph]
        moved = LatencyEstimate(0.0) if reduce is None else reduce.at(tokens * shape.hidden_size)
        if experts is None or moved is None:
            return None
        per_rank = tokens // self.deployment.dp
        gpu, hidden = find_gpu(self.deployment.gpu), shape.hidden_size
        norm = 1e3 * per_rank * hidden * 4 * 2 / (gpu.bandwidth * MEMORY_PART)

        def mlp(width: int) -> float:
            up = self._product(tokens, 2 * width // gpus, hidden, names.weights)
            return up + self._product(tokens, hidden, width // gpus, names.weights)

        layers, dense = shape.num_hidden_layers, shape.first_k_dense_replace
        beside = mlp(shape.n_shared_experts * shape.moe_intermediate_size)
        beside += self._product(tokens, shape.n_routed_experts, hidden, "bfloat16")
        rest = layers * 2 * norm + (layers - dense) * beside + dense * mlp(shape.intermediate_size)
        rest += self._product(heads, shape.vocab_size // gpus, hidden, "bfloat16")
        return moved * (2 * layers) + experts * (layers - dense) + LatencyEstimate(rest)

    def _find_product(self, rows: int, width: int, depth: int, weights: str) -> float:
        """Return a matrix product's latency, scaled from the nearest measured one."""
        near = min(self._sizes, key=lambda s: abs(s[0] / width - 1) + abs(s[1] / depth - 1))
        series: Series = self._wheel.series(
            f"gemm/{ENGINE}/gemm_perf",
            "m",
            {"n": near[0], "k": near[1], "gemm_dtype": weights},
        )
        latency = series.at(rows)
        if latency is None:
            raise BenchError(f"the rows have no product of {rows} x {depth} x {width}")
        return latency.value * (width * depth) / (near[0] * near[1])

    @cached_property
    def _sizes(self) -> tuple[tuple[int, int], ...]:
        every = self._wheel.rows(
            f"gemm/{ENGINE}/gemm_perf", {"m": 1, "gemm_dtype": self.deployment.measured.weights}
        )
        return tuple({(row["n"], row["k"]) for row in every})


def _sum(parts: Iterable[tuple[int, LatencyEstimate | None]]) -> LatencyEstimate | None:
    """Add as many of each part; None where one of them is not known."""
    total = LatencyEstimate(0.0)
    for count, part in parts:
        if part is None:
            return None
        total += part * count
    return total


TITLES: dict[Metric, str] = {
    "prefill": "Prefill of one prompt a rank",
    "decode": "Decode, one request a rank",
    "full": "Decode, as many requests as cache and rows have (their number in brackets)",
}
Patterns = Sequence[tuple[str, Pattern]]


def find_model(model: str) -> str:
    """Return the name in :data:`MODELS` of a checkpoint's folder, or of a name in any case.

    Raises:
        BenchError: NVIDIA has measured no layers of it, it shares already, or there is no folder.
        CheckpointError: a folder that is no DSA checkpoint, or quantised as no row is.
    """
    path = Path(model)
    if path.is_dir():
        return _model_in(path)
    if model.startswith(("/", ".", "~")):
        raise BenchError(f"there is no folder {model} here")
    given = model.rpartition("/")[2].lower()
    for name, measured in MODELS.items():
        if name.lower() == given:
            return name
        if measured.shared.rpartition("/")[2].lower() == given:
            raise _shares_already(model)
    raise _unmeasured(model)


def _model_in(folder: Path) -> str:
    """Return the name of the measured model that a checkpoint has the shape and weights of."""
    config = read_config(folder)
    checkpoint = Checkpoint.from_config(config, str(folder))
    if checkpoint.shares_already:
        raise _shares_already(str(folder))
    shape = ModelShape.from_config(text_config(config))
    weights = "fp8_block" if fp8_blocks(folder) else "bfloat16"
    for name, measured in MODELS.items():
        if (PRESETS[measured.shape], measured.weights) == (shape, weights):
            return name
    raise _unmeasured(str(folder))


def _shares_already(model: str) -> BenchError:
    return BenchError(
        f"{model} shares already, as it was trained to, so no pattern is to be planned: it is "
        "served so with or without IndexCache. Its S layers stand for GLM-5's in a plan of GLM-5."
    )


def _unmeasured(model: str) -> BenchError:
    return BenchError(
        f"nobody has published measured layers of {model}. There are rows of "
        f"{', '.join(MODELS)}, by these names or as a folder of such a checkpoint; measure others "
        "with `indexcache bench latency`."
    )


def choose_patterns(values: Sequence[str], shape: str) -> tuple[Patterns, tuple[str, ...]]:
    """Return patterns by the names that a user gave, and notes on them.

    A ratio takes the library's pattern for this model. Where it has none, it takes as many F layers
    evenly spaced: time depends on their number only. ``shape`` is one of :data:`.shapes.PRESETS`.

    Raises:
        IndexCacheError: a pattern that does not fit.
    """
    checkpoint = checkpoint_of(shape)
    patterns, notes = [], []
    for name, value in map(name_and_pattern, values):
        try:
            resolved = Library.default().resolve(value, checkpoint)
            pattern = resolved.pattern
            notes += _note_on_retention(value, resolved)
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


def _note_on_retention(value: str, resolved: Resolved) -> list[str]:
    """Say how many layers a library pattern keeps, where its ratio hardly tells that."""
    entry, pattern = resolved.entry, resolved.pattern
    if entry is None or abs(Fraction(entry.retention) - pattern.retention) < TOLD_OFF:
        return []
    return [
        f"{value} is {entry.name}, called {entry.retention} where it was published: "
        f"{pattern.summary()}."
    ]


def plan_grid(forwards: Forwards, patterns: Patterns, contexts: Sequence[int]) -> Grid:
    """Return the gains over every indexer on, laid out as the paper's Table 1."""
    rows: list[tuple[str, ...]] = []
    for metric, title in TITLES.items():
        rows.append((title,))
        by_pattern = [
            [forwards.gain(metric, pattern, n) for n in contexts] for _, pattern in patterns
        ]
        unit = "s" if metric == "prefill" else "ms a step"
        base = [_base(gains, metric) for gains in zip(*by_pattern, strict=True)]
        if any(base):
            rows.append((f"every indexer, {unit}", *(text or NO_RATE for text in base)))
        for (name, pattern), gains in zip(patterns, by_pattern, strict=True):
            rows.append(
                (f"{name} ({len(pattern.full_layers)} of {len(pattern)} F)", *map(_cell, gains))
            )
        for way, name, gains in (
            _of_shared_rows(forwards, patterns, contexts) if metric == "prefill" else ()
        ):
            rows.append((f"{name}, {way}", *map(_cell, gains)))
    header = ("", *map(format_length, contexts))
    return Grid(f"expected speed-up over every indexer: {forwards.title}", header, tuple(rows))


def _of_shared_rows(
    forwards: Forwards, patterns: Patterns, contexts: Sequence[int]
) -> Iterator[tuple[Way, str, list[Gain | None]]]:
    """Yield what each way of dealing out a prefill's rows gains, by itself and with patterns."""
    everything = Pattern.full(len(patterns[0][1]))
    for way in forwards.ways:
        for name, pattern in [("every indexer", everything), *patterns]:
            yield way, name, [forwards.gain("prefill", pattern, n, way) for n in contexts]


def plan_to_json(forwards: Forwards, patterns: Patterns, contexts: Sequence[int]) -> dict[str, Any]:
    """Return the same gains for programs.

    ``every_indexer_ms`` is a prompt's or a step's time with every indexer; it and ``speedup`` are
    null where nothing is known, and either may be off by ``off``, a part of it.
    """
    gains = []
    for metric in METRICS:
        for name, pattern in patterns:
            for context in contexts:
                gain = forwards.gain(metric, pattern, context)
                gains.append(
                    {
                        "metric": metric,
                        "name": name,
                        "full_layers": len(pattern.full_layers),
                        "layers": len(pattern),
                        "context": context,
                        "speedup": gain and gain.gain,
                        "every_indexer_ms": gain and gain.milliseconds,
                        "requests": gain and gain.requests,
                        "off": gain and gain.off,
                    }
                )
    row_split = [
        {
            "way": way,
            "name": name,
            "context": context,
            "speedup": gain and gain.gain,
            "off": gain and gain.off,
        }
        for way, name, row in _of_shared_rows(forwards, patterns, contexts)
        for context, gain in zip(contexts, row, strict=True)
    ]
    return {"deployment": forwards.title, "gains": gains, "row_split": row_split}


def _cell(gain: Gain | None) -> str:
    return NO_RATE if gain is None else f"{gain.gain:.2f}x"


def _base(gains: Sequence[Gain | None], metric: Metric) -> str:
    """Say the time with every indexer, which all patterns have in common."""
    gain = next((value for value in gains if value is not None), None)
    if gain is None:
        return ""
    if metric == "prefill":
        return f"{gain.milliseconds / 1e3:.1f}"
    return f"{gain.milliseconds:.1f}" + (f" ({gain.requests})" if metric == "full" else "")


def plan(
    model: str,
    gpu: str,
    gpus: int,
    dp: int,
    kv: str,
    data: Path | None = None,
    ways: Sequence[Way] = (),
) -> Forwards:
    """Return the forwards of a deployment that can be; see :class:`Deployment`.

    The wheel's ``data`` are where pip put them, if left out.

    Raises:
        BenchError: an unknown model or GPU, weights that do not fit, no rows, or no wheel.
    """
    deployment = Deployment(find_model(model), gpu.lower(), gpus, dp, kv)
    deployment.check_fits()
    forwards = Forwards(deployment, data)
    forwards.deal_out(*ways)
    return forwards
