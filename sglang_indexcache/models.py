"""The model families: one row each, with everything that distinguishes them.

To add a family, add its row to :data:`FAMILIES`. An architecture alone is enough to serve a family;
``model_type`` makes it trainable and allows models with random weights. Standard library only.
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

EXPERTS = "n_routed_experts"
"""Config field that expert pruning changes; attention and indexers stay as they are."""

RECOGNISED_BY = ("hidden_size", "num_attention_heads", EXPERTS)
"""Config fields by which a searched pattern identifies its model."""


def read_field(config: Any, name: str) -> Any:
    """Return a field of a HF config (object or ``config.json`` dict), or None if it is absent."""
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def _every_layer(text: Any) -> tuple[int, ...]:
    return tuple(range(read_field(text, "num_hidden_layers") or read_field(text, "num_layers")))


def _two_a_block(text: Any) -> tuple[int, ...]:
    """Return the numbers of LongCat's attention layers, two for each block."""
    blocks = read_field(text, "num_layers") or read_field(text, "num_hidden_layers")
    return tuple(range(2 * blocks))


def _without_linear_attention(text: Any) -> tuple[int, ...]:
    """Return the layers that have an indexer in GLM-5-Next: all but the linear (KDA) ones."""
    layers = _every_layer(text)
    if (linear := read_field(text, "linear_attn_config")) is not None:
        without = set(read_field(linear, "kda_layers") or ())
    elif (types := read_field(text, "layer_types")) is not None:
        without = {i for i, kind in enumerate(types) if kind == "linear_attention"}
    else:
        without = {i for i in layers if i % 4 != 3}
    return tuple(i for i in layers if i not in without)


@dataclass(frozen=True)
class Family:
    """A sparse-attention architecture.

    Attributes:
        refused: why SGLang 0.5.23 cannot serve it with shared indices; empty if it can.
        unsupported: why this package cannot share its indices, and who can; empty if it can.
        layer_ids: returns the layers with an indexer, in order, from the language model's config.
        hands_on: whether SGLang passes indices from one pipeline stage to the next.
        name: what our own recipes call it.
        model_type: its transformers model type, if it can be trained.
        interleaved: whether the indexer's RoPE rotates pairs of neighbouring dimensions instead of
            the two halves.
        extra_config: fields of ``config.json`` that SGLang requires and transformers does not
            write, with the values that match transformers' code.
    """

    architecture: str
    refused: str = ""
    unsupported: str = ""
    layer_ids: Callable[[Any], tuple[int, ...]] = _every_layer
    live: bool = True
    hands_on: bool = True
    name: str = ""
    model_type: str = ""
    interleaved: bool = False
    extra_config: Mapping[str, Any] = field(default_factory=dict)


_READ_BY_SGLANG = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}

FAMILIES = (
    Family(
        "GlmMoeDsaForCausalLM",
        name="glm-5",
        model_type="glm_moe_dsa",
        interleaved=True,
        extra_config={**_READ_BY_SGLANG, "indexer_rope_interleave": True},
    ),
    Family(
        "DeepseekV32ForCausalLM",
        name="deepseek-v3.2",
        model_type="deepseek_v32",
        extra_config=_READ_BY_SGLANG,
    ),
    Family("DeepseekV3ForCausalLM", extra_config=_READ_BY_SGLANG),
    Family("HYV4ForCausalLM"),
    Family("LongcatFlashForCausalLM", layer_ids=_two_a_block),
    # Live mode stores keys through SGLang code that this model's layers do not run.
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
            unsupported="its indexers select blocks of tokens, for each group of heads by itself; "
            "on AMD's gfx95 SGLang shares them itself, by SGLANG_MINIMAX_M3_INDEX_TOPK_FREQ",
        )
        for architecture in (
            "MiniMaxM3SparseForCausalLM",
            "MiniMaxM3SparseForConditionalGeneration",
            "MiniMaxM3VLForCausalLM",
        )
    ),
    # vLLM's issue 54890: an indexer takes 16.9 us a layer, 12 layers, of a 10.2 ms step (batch 16,
    # 64K tokens, GB300).
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


def family_of(architecture: str) -> Family:
    """Return the family of an architecture; a default family if none is listed."""
    return BY_ARCHITECTURE.get(architecture, Family(architecture))
