"""Dimensions of the models that the paper and its readers care about, and of any checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_indexcache.checkpoint import Checkpoint, read_config
from sglang_indexcache.errors import BenchError
from sglang_indexcache.library import Strict
from sglang_indexcache.models import FAMILIES, SHAPES, TRAINABLE


class ModelShape(Strict):
    """What decides the cost of a DSA model's layer. Names are those of the HF config.

    Attributes:
        name: how results call it.
        layers: in the model.
        hidden: width of the residual stream.
        heads: MLA heads.
        q_lora: rank of the query's low-rank projection.
        kv_lora: width of the latent, which is also the value.
        nope: width of a head's part without rotary embedding.
        rope: width of the rotary part.
        v: width of a head's value after the up-projection.
        index_heads: of the indexer.
        index_dim: width of an index key.
        topk: selected tokens.
        experts: routed experts.
        active_experts: of them, per token.
        expert_width: intermediate width of an expert.
        shared_experts: always active.
        dense_layers: first layers with a dense MLP instead of experts.
        dense_width: its intermediate width.
        vocab: of the output projection.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    q_lora: int
    kv_lora: int = 512
    nope: int
    rope: int = 64
    v: int
    index_heads: int
    index_dim: int = 128
    topk: int = 2048
    experts: int
    active_experts: int
    expert_width: int
    shared_experts: int = 1
    dense_layers: int
    dense_width: int
    vocab: int

    @property
    def latent(self) -> int:
        """Width of a row of the KV cache."""
        return self.kv_lora + self.rope

    @property
    def attention_parameters(self) -> int:
        """Of one layer's MLA: its five projections."""
        head = self.nope + self.rope
        return (
            self.hidden * self.q_lora
            + self.q_lora * self.heads * head
            + self.hidden * self.latent
            + self.kv_lora * self.heads * (self.nope + self.v)
            + self.heads * self.v * self.hidden
        )

    @property
    def indexer_parameters(self) -> int:
        """Of one layer's indexer."""
        queries = self.q_lora * self.index_heads * self.index_dim
        return queries + self.hidden * (self.index_dim + self.index_heads)

    @property
    def active_mlp_parameters(self) -> int:
        """That a token uses in one MoE layer."""
        active = self.active_experts + self.shared_experts
        return 3 * self.hidden * self.expert_width * active + self.hidden * self.experts

    @property
    def mlp_parameters(self) -> int:
        """Of all layers' experts and dense MLPs, and of embedding and output projection."""
        experts = 3 * self.expert_width * (self.experts + self.shared_experts) + self.experts
        sparse = self.hidden * experts * (self.layers - self.dense_layers)
        return sparse + self.hidden * (3 * self.dense_width * self.dense_layers + 2 * self.vocab)


_FIELDS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "q_lora": "q_lora_rank",
    "kv_lora": "kv_lora_rank",
    "nope": "qk_nope_head_dim",
    "rope": "qk_rope_head_dim",
    "v": "v_head_dim",
    "index_heads": "index_n_heads",
    "index_dim": "index_head_dim",
    "topk": "index_topk",
    "experts": "n_routed_experts",
    "active_experts": "num_experts_per_tok",
    "expert_width": "moe_intermediate_size",
    "dense_width": "intermediate_size",
    "vocab": "vocab_size",
}
"""What the HF config calls a shape's fields."""


def _from_config(name: str, config: Mapping[str, Any]) -> ModelShape:
    return ModelShape(
        name=name,
        shared_experts=config.get("n_shared_experts") or 0,
        dense_layers=config.get("first_k_dense_replace") or 0,
        **{ours: config[theirs] for ours, theirs in _FIELDS.items()},
    )


PRESETS = {name: _from_config(name, fields) for name, fields in SHAPES.items()}


def preset(name: str) -> ModelShape:
    """A shape by name.

    Raises:
        BenchError: there is none.
    """
    if name not in PRESETS:
        raise BenchError(
            f"--model {name} is neither a folder nor a known model. Known are GLM-5-FP8, "
            f"{', '.join(PRESETS)}."
        )
    return PRESETS[name]


def checkpoint_of(shape: ModelShape) -> Checkpoint:
    """A checkpoint of this shape with every indexer, for the pattern library."""
    family = next((f for f in FAMILIES if shape.name in f.shapes), TRAINABLE["glm_moe_dsa"])
    fields = {theirs: getattr(shape, ours) for ours, theirs in _FIELDS.items()}
    return Checkpoint.from_config({**fields, "architectures": [family.architecture]})


def shape_of(model: str) -> ModelShape:
    """A preset by name, or the shape of a checkpoint folder.

    Raises:
        BenchError: neither, or a config without a field that is needed.
        CheckpointError: a folder without a readable config.json.
    """
    folder = Path(model)
    if not folder.is_dir():
        return preset(model)
    config = read_config(folder)
    try:
        return _from_config(folder.resolve().name, config.get("text_config") or config)
    except KeyError as error:
        raise BenchError(
            f"{folder / 'config.json'} has no {error}, which a DSA model's config has"
        ) from error
