"""A recipe that runs in a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from sglang_indexcache.heal.recipe import Recipe

FIELDS = {
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 8,
    "initializer_range": 0.1,
}


def tiny(**changes: Any) -> dict[str, Any]:
    """All three stages, 4 layers, half of them F."""
    stage = {"rows": 4, "length": 48, "warmup_steps": 2}
    recipe = {
        "model": {"fields": FIELDS, "vocab_size": 700},
        "pattern": "uniform:1/2",
        "data": {
            "text_characters": 400_000,
            "mixture": {"text": 1.0, "recall": 1.0, "needles": 1.0, "tracking": 1.0},
            "lengths": [24, 48],
        },
        "stages": [
            {"kind": "dense", "steps": 4, "optimizer": "muon", **stage},
            {"kind": "warmup", "steps": 4, **stage},
            {"kind": "sparse", "steps": 4, "optimizer": "muon", "micro_rows": 1, **stage},
        ],
        "log_every": 1,
        "save_every": 2,
        "eval_rows": 2,
        "dtype": "float32",
    }
    return {**recipe, **changes}


def tiny_recipe(**changes: Any) -> Recipe:
    return Recipe.model_validate(tiny(**changes))


def write(path: Path, **changes: Any) -> Path:
    path.write_text(yaml.safe_dump(tiny(**changes)))
    return path
