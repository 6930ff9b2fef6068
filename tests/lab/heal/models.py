"""Tiny transformers DSA models with random weights, in float64 where exactness is the point."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
)

from sglang_indexcache.lab.heal.forward_state import Stage
from tests.fixtures.training import DistilledModel

FAMILIES = {
    "glm-5": (GlmMoeDsaConfig, GlmMoeDsaForCausalLM),
    "deepseek-v3.2": (DeepseekV32Config, DeepseekV32ForCausalLM),
}
VOCAB, LAYERS, TOPK = 64, 4, 6

FIELDS = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": LAYERS,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": TOPK,
    "initializer_range": 0.3,  # large, so that attention and selection are far from uniform
}


def make(family: str, dtype: torch.dtype = torch.float64, **fields: Any) -> Any:
    """Make a fresh random model."""
    config, model = FAMILIES[family]
    return model(config(**{**FIELDS, **fields})).to(dtype)


def tokens(rows: int, length: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (rows, length))


def one_document(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the arguments of a DistilledModel for rows that hold one document each."""
    return {
        "ids": ids,
        "labels": ids,
        "documents": torch.zeros_like(ids),
        "positions": torch.arange(ids.shape[1]).expand_as(ids),
    }


def logits(model: DistilledModel, ids: torch.Tensor, stage: Stage) -> torch.Tensor:
    """Return the logits of every token."""
    batch = one_document(ids)
    del batch["labels"]
    return model.model.lm_head(model.hidden(**batch, stage=stage))
