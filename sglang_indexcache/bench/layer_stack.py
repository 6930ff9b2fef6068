"""What a run of the layer stack leaves (``benchmarks/stack``), and what the planner reads of it."""

from __future__ import annotations

from typing import Any, Literal

from sglang_indexcache.bench.environment import Environment
from sglang_indexcache.bench.results import Strict
from sglang_indexcache.bench.shapes import ModelShape

Phase = Literal["prefill", "decode"]
STAGES = ("index projections", "score and select", "projections", "attention", "mlp")
INDEXER_STAGES = STAGES[:2]


class Row(Strict):
    """One context length.

    Attributes:
        phase: which.
        length: prompt tokens; in decode, tokens in the cache.
        requests: at once (decode); 1 in prefill.
        full_layer: seconds by stage of one F layer.
        shared_layer: likewise of one S layer.
        full_total: seconds of one F layer with no timer between the stages.
        shared_total: likewise of one S layer.
        neighbour_overlap: part of the selection that a query has in common with the next.
    """

    phase: Phase
    length: int
    requests: int
    full_layer: dict[str, float]
    shared_layer: dict[str, float]
    full_total: float
    shared_total: float
    neighbour_overlap: float | None

    @property
    def indexer_share(self) -> float:
        """Part of an F layer's time that its indexer takes."""
        stages = self.full_layer
        return sum(stages[name] for name in INDEXER_STAGES) / sum(stages.values())

    @property
    def realised(self) -> float:
        """Time that an S layer should take (an F layer without its indexer) over what it takes."""
        return self.full_total * (1 - self.indexer_share) / self.shared_total

    def seconds(self, full: int, shared: int) -> float:
        """Time of a model with so many F and S layers."""
        return full * self.full_total + shared * self.shared_total


class LayerStackResult(Strict):
    """One run of the layer-stack benchmark.

    Attributes:
        kind: tells result files apart.
        environment: where.
        device: "cpu" or the GPU's name.
        kernels: who scored, selected and attended.
        shape: of the model.
        layers: that were run; the model's other layers are taken to cost the same.
        dtype: of weights and activations.
        kv: layout of the latent cache: the dtype, or fp8 for rows of 656 bytes.
        chunk: tokens of a prefill chunk.
        repeats: of every measurement.
        cuda_graph: whether decode totals were replayed from a CUDA graph.
        rows: what was measured.
    """

    kind: Literal["layer-stack"] = "layer-stack"
    environment: Environment
    device: str
    kernels: str
    shape: ModelShape
    layers: int
    dtype: str
    kv: str
    chunk: int
    repeats: int
    cuda_graph: bool
    rows: tuple[Row, ...]


class StackCheck(Strict):
    """The layer stack with several sets of kernels on one card (``benchmarks/stack/check.py``).

    Attributes:
        kind: tells result files apart.
        dry: tiny sizes on a CPU, whose times mean nothing.
        machine: card, driver, versions, commit.
        results: of every set that measured anything.
        problems: why a set, or a build, did not come to its end.
        not_measured: rows that are missing of a set that measured others.
    """

    kind: Literal["stack-check"] = "stack-check"
    dry: bool
    machine: dict[str, Any]
    results: tuple[LayerStackResult, ...]
    problems: dict[str, str]
    not_measured: tuple[str, ...]
