"""What a GPU could do: data sheets, and one layer's prefill from published rates of its kernels.

The layer's time is a model, not a measurement, for shapes that nobody measured: arithmetic at the
rates that kernels are known to reach, and what the top-k reads. Every layer counts as one with
experts; communication is left out. Neither torch nor pydantic is needed to import this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_indexcache.errors import BenchError

if TYPE_CHECKING:
    from sglang_indexcache.bench.shapes import ModelShape

INDEXER_PART = 1145 / 1979
"""Of the FP8 rate: DeepGEMM's MQA logits on an H200 with 64 heads (sglang #11989), which includes
writing the logits."""
MLA_PART = 640 / 989
"""Of the bfloat16 rate: FlashMLA's sparse prefill on an H800 (its README)."""
GEMM_PART = 0.6
"""Of the bfloat16 rate, for projections and experts: an assumption."""
MEMORY_PART = 0.8
"""Of the bandwidth: an assumption."""
TOPK_READS = 2
"""SGLang's top-k reads the matrix of logits twice."""
MLA_HEAD_TILE = 64
"""FlashMLA pads to it."""
INDEX_K_BYTES = 128 + 4
"""Of a token's index key: e4m3 and a float32 scale."""
KV_BYTES = {"fp8": 656, "bf16": 1152}
"""Of a token's latent row (FlashMLA's FP8 format; 576 bfloat16)."""


@dataclass(frozen=True)
class Gpu:
    """One of NVIDIA's data sheets, dense rates.

    Attributes:
        name: as NVIDIA's.
        bf16: FLOP/s.
        fp8: FLOP/s.
        bandwidth: of the memory, bytes/s.
        float32: FLOP/s, not of the matrix units.
        memory: bytes.
    """

    name: str
    bf16: float
    fp8: float
    bandwidth: float
    float32: float
    memory: float

    def bound(self, flops: float, memory_bytes: float, *, fp8: bool) -> tuple[float, str]:
        """The least seconds for some work, and what sets them.

        Args:
            flops: of matrix products.
            memory_bytes: that have to cross the memory bus once.
            fp8: the products' type; else bfloat16.
        """
        compute = flops / (self.fp8 if fp8 else self.bf16)
        memory = memory_bytes / self.bandwidth
        return (compute, "matrix unit") if compute > memory else (memory, "memory")


GPUS = {
    "h100": Gpu("H100 SXM", 989e12, 1979e12, 3.35e12, 67e12, 80e9),
    "h200": Gpu("H200 SXM", 989e12, 1979e12, 4.8e12, 67e12, 141e9),
    "b200": Gpu("B200", 2250e12, 4500e12, 8.0e12, 75e12, 180e9),
}


def find_gpu(name: str) -> Gpu:
    """A data sheet by name.

    Raises:
        BenchError: there is none.
    """
    if name.lower() not in GPUS:
        raise BenchError(f"no rates are known for {name!r}; there are {', '.join(GPUS)}")
    return GPUS[name.lower()]


def gpu_of_driver(name: str) -> Gpu | None:
    """The data sheet of the GPU that the driver calls ``name``; PCIe and NVL versions have none."""
    if "PCIe" in name or "NVL" in name:
        return None
    return next((gpu for model, gpu in GPUS.items() if model.upper() in name), None)


def score_flops(pairs: float, heads: int, width: int) -> float:
    """Multiplications and additions of an indexer's scores.

    Args:
        pairs: of a query and a token that it sees.
        heads: of the indexer.
        width: of an index key.
    """
    return 2 * width * heads * pairs


def attention_flops(selected: float, heads: int, latent: int, values: int) -> float:
    """Multiplications and additions of sparse MLA.

    Args:
        selected: pairs of a query and a token that it attends to.
        heads: of MLA, padded where a kernel computes the padding too.
        latent: width of a row of the KV cache.
        values: width of its part that is the value.
    """
    return 2 * heads * (latent + values) * selected


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer.

    Attributes:
        indexer: projections, scores, selection.
        attention: sparse MLA and its projections.
        mlp: experts.
    """

    indexer: float
    attention: float
    mlp: float

    @property
    def full(self) -> float:
        """An F layer."""
        return self.indexer + self.shared

    @property
    def shared(self) -> float:
        """An S layer."""
        return self.attention + self.mlp


def prefill_layer(shape: ModelShape, gpu: Gpu, length: int, tp: int = 1) -> LayerTime:
    """One layer for a whole prompt; under tensor parallelism the indexer is not split.

    Args:
        shape: of the model.
        gpu: data sheet.
        length: tokens of the prompt.
        tp: ranks that share the heads and the experts.
    """
    pairs = length * (length + 1) / 2
    flops = score_flops(pairs, shape.index_heads, shape.index_dim)
    scores = flops / (gpu.fp8 * INDEXER_PART)
    reads = TOPK_READS * 4 * pairs / (gpu.bandwidth * MEMORY_PART)
    gemm = 2 * length / (gpu.bf16 * GEMM_PART)
    heads = -(-shape.heads // tp)
    padded = -(-heads // MLA_HEAD_TILE) * MLA_HEAD_TILE
    selected = sum_selected(length, shape.topk)
    attended = attention_flops(selected, padded, shape.latent, shape.kv_lora)
    return LayerTime(
        indexer=scores + reads + gemm * shape.indexer_parameters,
        attention=attended / (gpu.bf16 * MLA_PART) + gemm * shape.attention_parameters / tp,
        mlp=gemm * shape.active_mlp_parameters / tp,
    )


def sum_selected(length: int, topk: int) -> float:
    """Selected tokens over all queries of a prompt: a query that sees fewer than k takes all."""
    short = min(length, topk)
    return short * (short + 1) / 2 + (length - short) * topk
