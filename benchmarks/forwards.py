"""Whole forwards of a deployment, composed from NVIDIA's measured layers.

A whole forward is composed from measured rows of its parts: a layer is its attention module
(:mod:`.nvidia_rows`: with the indexer in an F layer, without it in an S layer), two all-reduces,
two norms and the experts, or a dense MLP in the first layers. A prompt is a sum over its chunks, as
SGLang cuts it. Left out are what the scheduler adds between two steps, sampling, and the tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from benchmarks.nvidia_rows import (
    ENGINE,
    KINDS,
    Chunks,
    LatencyEstimate,
    RowSplitLayers,
    Series,
    Wheel,
)
from sglang_indexcache.errors import BenchError
from sglang_indexcache.lab.latency.forecast import MODELS, Gain, MeasuredModel, Phase
from sglang_indexcache.library.sizes import PRESETS, ModelShape, check_room, find_gpu
from sglang_indexcache.pattern import Pattern

MOST_OFF = 0.1
"""A figure that may be off by more is not given."""
EXPERT_LOADS = "power_law_1.01"
"""Distribution of the tokens over the experts that NVIDIA's own estimator takes."""
MEMORY_PART = 0.8
"""Share of the bandwidth that a norm reaches: an assumption."""
NCCL = "comm/nccl/2.29.2/nccl_perf"
"""The table of gathers: bytes that each rank has in the end, and milliseconds."""


@dataclass(frozen=True)
class Deployment:
    """Deployment that serves a model.

    Attributes:
        model: a name of :data:`MODELS`.
        gpu: a name of :data:`~sglang_indexcache.library.sizes.GPUS`.
        dp: ranks of data-parallel attention; 1 is tensor parallelism over all GPUs.
    """

    model: str
    gpu: str
    gpus: int = 8
    dp: int = 1

    def __post_init__(self) -> None:
        """Raise BenchError on a deployment that cannot be."""
        if self.gpus < 1 or self.dp < 1 or self.gpus % self.dp:
            raise BenchError(
                f"data-parallel attention shares the GPUs evenly: {self.dp} ranks, {self.gpus} GPUs"
            )
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
    def ranks(self) -> int:
        """GPUs that share one request's attention: attention's tensor parallelism."""
        return self.gpus // self.dp

    @property
    def cache(self) -> str:
        """Format of the KV cache: SGLang takes FP8 on Blackwell and bfloat16 on Hopper."""
        return "fp8" if self.gpu == "b200" else "bfloat16"

    @property
    def chunk(self) -> int:
        """Tokens of a rank's prefill chunk: SGLang's default, by memory, shared by the ranks."""
        return (16384 if find_gpu(self.gpu).memory > 160e9 else 8192) // self.dp

    @property
    def weight_bytes(self) -> float:
        """Weights on one GPU; attention's are repeated in each rank of data-parallel attention."""
        return self.measured.weight_bytes(self.gpus, self.dp)

    def __str__(self) -> str:
        ranks = f"--tp {self.gpus}" + (
            f" --dp {self.dp} --enable-dp-attention" if self.dp > 1 else ""
        )
        return f"{self.model}, {self.gpus} x {find_gpu(self.gpu).name}, {ranks}, {self.cache} cache"

    def check_fits(self) -> None:
        """Raise BenchError if the weights leave no room for a cache."""
        gpu = find_gpu(self.gpu)
        check_room(self.model, self.weight_bytes, self.gpus, self.dp, gpu.name, gpu.memory)


class Forwards:
    """The time of whole forwards of a deployment, and what patterns gain on it.

    Raises:
        BenchError: no rows of this deployment, or the wheel is not installed.
    """

    def __init__(self, deployment: Deployment, data: Path | None = None) -> None:
        self.deployment, self._shape = deployment, deployment.shape
        self.wheel = Wheel(deployment.gpu, data)
        names, gpus = deployment.measured, deployment.gpus
        heads = self._shape.num_attention_heads // deployment.ranks
        self.layers = self.wheel.layers(
            names.full, names.shared, heads, names.weights, deployment.cache
        )
        self._experts = self.wheel.series(
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
            graph: self.wheel.series(
                f"comm/{ENGINE}/custom_allreduce_perf",
                "message_size",
                {"num_gpus": gpus, "backend": "sglang_graph" if graph else "sglang_eager"},
            )
            for graph in (True, False)
        }
        self._product = cache(self._find_product)
        self._around = cache(self._time_around)

    @cached_property
    def gather(self) -> Series:
        """Milliseconds of an all-gather over attention's ranks, by the bytes that each then has."""
        columns = {"op_name": "all_gather", "nccl_dtype": "int8", "num_gpus": self.deployment.ranks}
        return self.wheel.series(NCCL, "message_size", columns)

    @cached_property
    def row_split(self) -> Chunks:
        """Layers in prefill where ranks share an indexer's rows; the layers if there is one."""
        ranks, shape, names = self.deployment.ranks, self._shape, self.deployment.measured
        if ranks == 1:
            return self.layers
        width = shape.index_n_heads * shape.index_head_dim

        def projected(rows: int) -> float:
            return self._product(rows, width, shape.q_lora_rank, names.weights)

        return RowSplitLayers(self.layers, ranks, self.gather, 4 * shape.index_topk, projected)

    @property
    def sources(self) -> tuple[str, ...]:
        """Sources of all parts, in sentences."""
        name = find_gpu(self.deployment.gpu).name
        sentences = [
            f"Attention: {self.layers.source}. {self.layers.left_out} rows that contradict others "
            "are left out.",
            f"Experts, products, all-reduce: rows of the same engine and card; experts loaded by "
            f"{EXPERT_LOADS}. Norms: bytes over {MEMORY_PART:.0%} of {name}'s bandwidth.",
            "Not counted: the scheduler between two steps, sampling; and MTP, whose verification "
            "asks for several tokens of a request at once, of which there are no rows.",
            f"Where a time may be off by more than {MOST_OFF:.0%} (each row predicted from its "
            "neighbours), or no rows are, it says so.",
        ]
        if self.deployment.dp > 1:
            sentences.append("Gather and scatter of the ranks' tokens count as two all-reduces.")
        if self.deployment.ranks > 1:
            sentences.append(
                "Row split (--indexcache-split-rows): each rank's indexer scores its share of a "
                "chunk, and NCCL gathers the lists (NVIDIA's rows); every rank still makes all "
                "index queries."
            )
        return (*sentences, self.deployment.measured.note)

    def gain(
        self, phase: Phase, pattern: Pattern, context: int, layers: Chunks | None = None
    ) -> Gain | None:
        """Return a pattern's gain; None where nothing is known, or what is may be too far off.

        It is over every indexer on every rank. A prefill may run on other ``layers``, such as
        :attr:`row_split`.
        """
        count = len(pattern.full_layers)
        if phase == "prefill":
            full, mine = self.prefill(len(pattern), context), self.prefill(count, context, layers)
        else:
            full, mine = (self.decode(number, context) for number in (len(pattern), count))
        if full is None or mine is None or max(full.off, mine.off) > MOST_OFF:
            return None
        return Gain(full.value, full.value / mine.value, max(full.off, mine.off))

    def prefill(
        self, full_layers: int, context: int, layers: Chunks | None = None
    ) -> LatencyEstimate | None:
        """Return milliseconds to read a prompt, one on each rank; None where rows are missing."""
        total = LatencyEstimate(0.0)
        layers = layers or self.layers
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

    def decode(self, full_layers: int, context: int) -> LatencyEstimate | None:
        """Return milliseconds of a step of one request on each rank; None as above."""
        full, shared = (self.layers.step(kind, 1, context) for kind in KINDS)
        shared_layers = self._shape.num_hidden_layers - full_layers
        around = self._around(self.deployment.dp, self.deployment.dp, True)
        return _sum([(full_layers, full), (shared_layers, shared), (1, around)])

    def _time_around(self, tokens: int, heads: int, graph: bool) -> LatencyEstimate | None:
        """Time all but attention: ``tokens`` of all ranks, ``heads`` of them to the vocabulary."""
        shape, gpus, names = self._shape, self.deployment.gpus, self.deployment.measured
        experts = self._experts.at(tokens)
        moved = self._reduce[graph].at(tokens * shape.hidden_size)
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
        series: Series = self.wheel.series(
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
        every = self.wheel.rows(
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
