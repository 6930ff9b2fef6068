"""The model families: one row each, and all that tells one from another.

To add a family, add its row to :data:`FAMILIES`. A row with nothing but an architecture is served;
``model_type`` makes it trainable and gives it models with random weights; ``shapes`` lets the
benchmarks speak of it without its weights. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

SHAPE_FIELDS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "n_routed_experts",
    "q_lora_rank",
    "kv_lora_rank",
    "index_topk",
    "index_n_heads",
    "index_head_dim",
)
"""Config fields that tell models of one architecture apart."""

LAYER_COUNTS = ("num_hidden_layers", "num_layers")
"""Config fields that say how many layers there are; LongCat has the second."""

BLOCK_LISTS = ("sparse_attention_freq", "sparse_disable_index_value")
BLOCK_SIZES = (
    "sparse_block_size",
    "sparse_topk_blocks",
    "sparse_num_index_heads",
    "sparse_index_dim",
)
"""Fields of MiniMax-M3's ``sparse_attention_config`` that SGLang reads: lists by layer, sizes."""

EXPERTS = "n_routed_experts"
"""The field that pruning changes: it leaves attention and indexers as they are."""

RECOGNISED_BY = ("hidden_size", "num_attention_heads", EXPERTS)
"""Those that a searched pattern names its model by."""


def read_field(config: Any, name: str) -> Any:
    """Return a field of a HF config, an object or the dict of a ``config.json``; None if absent."""
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def _every_layer(text: Any) -> tuple[int, ...]:
    return tuple(range(read_field(text, "num_hidden_layers") or read_field(text, "num_layers")))


def _two_a_block(text: Any) -> tuple[int, ...]:
    """Return a number for each of LongCat's attentions, two in each block."""
    blocks = read_field(text, "num_layers") or read_field(text, "num_hidden_layers")
    return tuple(range(2 * blocks))


def _without_linear_attention(text: Any) -> tuple[int, ...]:
    """Return the layers without linear (KDA) attention, which has no indexer in GLM-5-Next."""
    layers = _every_layer(text)
    if (linear := read_field(text, "linear_attn_config")) is not None:
        without = set(read_field(linear, "kda_layers") or ())
    elif (types := read_field(text, "layer_types")) is not None:
        without = {i for i, kind in enumerate(types) if kind == "linear_attention"}
    else:
        without = {i for i in layers if i % 4 != 3}
    return tuple(i for i in layers if i not in without)


def _with_blocks(text: Any) -> tuple[int, ...]:
    """Return MiniMax-M3's sparse layers: as transformers names them, else as it was published."""
    if (types := read_field(text, "layer_types")) is not None:
        sparse = [kind == "minimax_m3_sparse" for kind in types]
    else:
        published = read_field(text, "sparse_attention_config") or {}
        sparse = read_field(published, "sparse_attention_freq") or []
    return tuple(i for i, on in enumerate(sparse) if on)


def _tokens(text: Any) -> int | None:
    tokens: int | None = read_field(text, "index_topk")
    return tokens


def _blocks(text: Any) -> int | None:
    """Return the tokens of MiniMax-M3's blocks; transformers, too, obeys the published form."""
    sparse = read_field(text, "sparse_attention_config") or {}
    blocks, size = (
        read_field(sparse, published) or read_field(text, name)
        for published, name in (
            ("sparse_topk_blocks", "index_topk_blocks"),
            ("sparse_block_size", "index_block_size"),
        )
    )
    return blocks * size if blocks and size else None


def _block_indexer(text: Any) -> dict[str, Any]:
    """Return MiniMax-M3's indexer as it was published, by the names of a DSA model's."""
    sparse = read_field(text, "sparse_attention_config") or {}
    published = {"index_n_heads": "sparse_num_index_heads", "index_head_dim": "sparse_index_dim"}
    sizes = {name: read_field(sparse, theirs) for name, theirs in published.items()}
    return {name: size for name, size in sizes.items() if size is not None}


@dataclass(frozen=True)
class Family:
    """A sparse-attention architecture.

    Attributes:
        refused: why SGLang 0.5.23 cannot serve it with shared indices; empty if it can.
        unsupported: why nothing here can share its indices, and who does; empty if we can.
        layer_ids: from the language model's config, the layers with an indexer, in order.
        topk: from it, how many tokens a query selects; None if it does not say.
        sizes: from it, those of :data:`SHAPE_FIELDS` that it has under other names.
        grouped: whether indexers select blocks of tokens, for each group of heads by itself. A
            server shares them in the model's own attention backend; all others are DSA's.
        hands_on: whether SGLang hands indices from one pipeline stage to the next.
        name: what our own recipes call it.
        model_type: its transformers model type, if it can be trained.
        interleaved: whether the indexer's RoPE turns neighbouring dimensions, not the two halves.
        extra_config: what SGLang reads in its ``config.json`` without a default and transformers
            does not write, with the value that transformers' code stands for.
        shapes: HF config fields of published models, by the names that benchmarks give them.
    """

    architecture: str
    refused: str = ""
    unsupported: str = ""
    layer_ids: Callable[[Any], tuple[int, ...]] = _every_layer
    topk: Callable[[Any], int | None] = _tokens
    sizes: Callable[[Any], dict[str, Any]] = lambda _: {}
    grouped: bool = False
    live: bool = True
    hands_on: bool = True
    name: str = ""
    model_type: str = ""
    interleaved: bool = False
    extra_config: Mapping[str, Any] = field(default_factory=dict)
    shapes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


_PUBLISHED = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
    "n_shared_experts": 1,
}

_READ_BY_SGLANG = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}

_GLM_5 = Family(
    "GlmMoeDsaForCausalLM",
    name="glm-5",
    model_type="glm_moe_dsa",
    interleaved=True,
    extra_config={**_READ_BY_SGLANG, "indexer_rope_interleave": True},
    shapes={
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
    },
)  # fmt: skip

_DEEPSEEK_V32 = Family(
    "DeepseekV32ForCausalLM",
    name="deepseek-v3.2",
    model_type="deepseek_v32",
    extra_config=_READ_BY_SGLANG,
    shapes={
        "deepseek-v3.2": {
            **_PUBLISHED, "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128,
            "q_lora_rank": 1536, "qk_nope_head_dim": 128, "v_head_dim": 128, "index_n_heads": 64,
            "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
            "first_k_dense_replace": 3, "intermediate_size": 18432, "vocab_size": 129280,
        },
    },
)  # fmt: skip

FAMILIES = (
    _GLM_5,
    _DEEPSEEK_V32,
    Family("DeepseekV3ForCausalLM", extra_config=_READ_BY_SGLANG),
    Family("HYV4ForCausalLM"),
    Family("LongcatFlashForCausalLM", layer_ids=_two_a_block),
    # Live mode stores keys by a path of SGLang's that this model's layers do not take.
    Family(
        "Glm5NextForConditionalGeneration",
        layer_ids=_without_linear_attention,
        live=False,
        hands_on=False,
    ),
    *(
        Family(name, refused="SGLang loads no indexer weights for it, so it would select at random")
        for name in ("MistralLarge3ForCausalLM", "PixtralForConditionalGeneration")
    ),
    Family(
        "Dots3NoteForCausalLM",
        refused="its attention runs the indexer in every layer and takes no indices",
    ),
    Family("AXK2ForCausalLM", refused="SGLang 0.5.23 has no such model"),
    Family(
        "DeepseekV4ForCausalLM",
        unsupported="its indexers select compressed entries of several tokens, in some of its "
        "layers; on Ascend, vllm-ascend shares them",
    ),
    Family(
        "DeepseekV41ForCausalLM",
        unsupported="it shares selections as it was trained to, and SGLang serves it so",
    ),
    *(
        Family(
            architecture,
            refused=refused,
            layer_ids=_with_blocks,
            topk=_blocks,
            sizes=_block_indexer,
            grouped=True,
            live=False,
            hands_on=False,
        )
        for architecture, refused in (
            ("MiniMaxM3SparseForCausalLM", ""),
            ("MiniMaxM3SparseForConditionalGeneration", ""),
            ("MiniMaxM3VLForCausalLM", "it is transformers' name for the language model alone"),
        )
    ),
    # By vLLM's issue 54890: 16.9 us a layer of 10.2 ms (batch 16, 64K tokens, GB300), 12 layers.
    Family(
        "Qwen4ExpForConditionalGeneration",
        unsupported="its few indexers take about two per cent of a decode step, so there is next "
        "to nothing to win",
    ),
    Family(
        "MiniCPMSALAForCausalLM",
        unsupported="it selects blocks by attention to pooled keys, without indexers",
    ),
)

BY_ARCHITECTURE = {family.architecture: family for family in FAMILIES}
TRAINABLE = {family.model_type: family for family in FAMILIES if family.model_type}
"""The families that transformers can run and this package can train, by model type."""
BY_NAME = {family.name: family for family in TRAINABLE.values()}
SHAPES = {name: shape for family in FAMILIES for name, shape in family.shapes.items()}
"""Every published shape by name."""


def family_of(architecture: str) -> Family:
    """Return the row of an architecture; one made up for what has none."""
    return BY_ARCHITECTURE.get(architecture, Family(architecture))
