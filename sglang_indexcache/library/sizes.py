"""Sizes that decide what fits a card: dimensions and weights of models, NVIDIA's data sheets."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from sglang_indexcache.checkpoint import Checkpoint
from sglang_indexcache.errors import BenchError
from sglang_indexcache.models import read_field

USED_MEMORY = 0.9
"""Share of a GPU's memory for weights and KV cache, close to SGLang's default."""


@dataclass(frozen=True)
class ModelShape:
    """Dimensions that decide a DSA layer's cost, named as in the HF config."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    intermediate_size: int
    vocab_size: int
    n_shared_experts: int
    first_k_dense_replace: int

    @classmethod
    def from_config(cls, config: Any) -> ModelShape | None:
        """Read the dimensions from a language model's config; None if a field is missing."""
        shape = {each.name: read_field(config, each.name) for each in fields(cls)}
        return None if None in shape.values() else cls(**shape)

    @property
    def attention_parameters(self) -> int:
        """Number of parameters in one layer's MLA: its five projections."""
        heads, rope = self.num_attention_heads, self.qk_rope_head_dim
        return (
            self.hidden_size * self.q_lora_rank
            + self.q_lora_rank * heads * (self.qk_nope_head_dim + rope)
            + self.hidden_size * (self.kv_lora_rank + rope)
            + self.kv_lora_rank * heads * (self.qk_nope_head_dim + self.v_head_dim)
            + heads * self.v_head_dim * self.hidden_size
        )

    @property
    def indexer_parameters(self) -> int:
        """Number of parameters in one layer's indexer."""
        heads, width = self.index_n_heads, self.index_head_dim
        return self.q_lora_rank * heads * width + self.hidden_size * (width + heads)

    def mlp_parameters_of(self, layer: int) -> int:
        """Count the parameters of a layer's dense MLP, or of its router and experts."""
        if layer < self.first_k_dense_replace:
            return 3 * self.hidden_size * self.intermediate_size
        experts = self.n_routed_experts + self.n_shared_experts
        return self.hidden_size * (3 * self.moe_intermediate_size * experts + self.n_routed_experts)

    @property
    def mlp_parameters(self) -> int:
        """Number of parameters in all experts, dense MLPs, the embedding and the output layer."""
        layers = sum(map(self.mlp_parameters_of, range(self.num_hidden_layers)))
        return layers + 2 * self.vocab_size * self.hidden_size

    def weight_bytes(self, gpus: int, dp: int, each: int) -> float:
        """Return the bytes of weights on each of ``gpus`` GPUs, at ``each`` bytes per parameter.

        Attention weights are replicated on each of ``dp`` data-parallel attention ranks, and
        indexer weights on every GPU.
        """
        attention = self.num_hidden_layers * (self.attention_parameters / (gpus / dp))
        indexers = self.num_hidden_layers * self.indexer_parameters
        return each * (attention + indexers + self.mlp_parameters / gpus)


def check_room(model: str, taken: float, gpus: int, dp: int, card: str, memory: float) -> None:
    """Refuse weights that take ``taken`` bytes of each GPU and leave no room for a KV cache.

    Args:
        dp: ranks of data-parallel attention, each of which repeats the attention's weights.
        memory: size in bytes of one ``card``'s memory.

    Raises:
        BenchError: the weights do not fit.
    """
    if taken < USED_MEMORY * memory:
        return
    fewer = ", or fewer ranks of attention (--dp)" if dp > 1 else ""
    raise BenchError(
        f"the weights do not fit: {model} takes {taken / 1e9:.0f} GB of each of {gpus} GPUs, and "
        f"{card} has {memory / 1e9:.0f}. Take GPUs with more memory, or more of them{fewer}."
    )


_PUBLISHED = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
    "n_shared_experts": 1,
}

SHAPES: dict[str, dict[str, int]] = {
    # GLM-4.7-Flash with an indexer, the paper's 30B model (design: 47 layers, 20 heads).
    "30b": {
        **_PUBLISHED, "num_hidden_layers": 47, "hidden_size": 2048, "num_attention_heads": 20,
        "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256, "index_n_heads": 32,
        "n_routed_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 1536,
        "first_k_dense_replace": 1, "intermediate_size": 10240, "vocab_size": 154880,
    },
    "glm-5": {
        **_PUBLISHED, "num_hidden_layers": 78, "hidden_size": 6144, "num_attention_heads": 64,
        "q_lora_rank": 2048, "qk_nope_head_dim": 192, "v_head_dim": 256, "index_n_heads": 32,
        "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3, "intermediate_size": 12288, "vocab_size": 154880,
    },
    "deepseek-v3.2": {
        **_PUBLISHED, "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128,
        "q_lora_rank": 1536, "qk_nope_head_dim": 128, "v_head_dim": 128, "index_n_heads": 64,
        "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3, "intermediate_size": 18432, "vocab_size": 129280,
    },
}  # fmt: skip
"""HF config fields of published models, by the names that benchmarks give them."""

ARCHITECTURES = {
    "30b": "GlmMoeDsaForCausalLM",
    "glm-5": "GlmMoeDsaForCausalLM",
    "deepseek-v3.2": "DeepseekV32ForCausalLM",
}

PRESETS = {name: ModelShape(**fields) for name, fields in SHAPES.items()}


def checkpoint_of(name: str) -> Checkpoint:
    """Make a checkpoint of the preset ``name`` with every indexer, for the pattern library."""
    return Checkpoint.from_config({**SHAPES[name], "architectures": [ARCHITECTURES[name]]})


@dataclass(frozen=True)
class Gpu:
    """A GPU by NVIDIA's data sheet.

    Fields are FLOP/s of dense products, memory bandwidth in bytes/s and memory size in bytes.
    """

    name: str
    bf16: float
    bandwidth: float
    memory: float


GPUS = {
    "h100": Gpu("H100 SXM", 989e12, 3.35e12, 80e9),
    "h200": Gpu("H200 SXM", 989e12, 4.8e12, 141e9),
    "b200": Gpu("B200", 2250e12, 8.0e12, 180e9),
}


def find_gpu(name: str) -> Gpu:
    """Return the GPU called ``name``.

    Raises:
        BenchError: no GPU has this name.
    """
    if name.lower() not in GPUS:
        raise BenchError(f"no rates are known for {name!r}; there are {', '.join(GPUS)}")
    return GPUS[name.lower()]
