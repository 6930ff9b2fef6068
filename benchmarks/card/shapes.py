"""Sizes of what the timed servers serve and are asked, on a card and in a rehearsal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_indexcache.library.sizes import SHAPES
from sglang_indexcache.models import BY_NAME

GLM = BY_NAME["glm-5"]
_CONFIG: Mapping[str, Any] = {
    **GLM.extra_config,
    "architectures": [GLM.architecture],
    "model_type": GLM.model_type,
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "max_position_embeddings": 262_144,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "routed_scaling_factor": 2.5,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
_FP8: Mapping[str, Any] = {
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
}
_RANKS = 8
"""Ranks of tensor parallelism of which a slice of GLM-5 has one's widths."""


def write_config(folder: Path, shape: Mapping[str, Any], layers: int) -> Path:
    """Write the ``config.json`` of a model, or of its first layers; weights are drawn."""
    config = {**_CONFIG, **shape, "num_hidden_layers": layers}
    config["num_key_value_heads"] = config["num_attention_heads"]
    config["num_experts"] = config["n_routed_experts"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def one_rank(shape: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """Return the widths that one of ``ranks`` multiplies; its indexer is whole."""
    split = ("num_attention_heads", "moe_intermediate_size", "intermediate_size", "vocab_size")
    return {**shape, **{name: shape[name] // ranks for name in split}}


@dataclass(frozen=True)
class Scale:
    """One size of everything.

    Attributes:
        model: config fields of the whole model.
        glm_5: config fields of a rank of GLM-5.
        patterns: retention -> value of ``--indexcache-pattern``; "" is stock SGLang.
        lengths: prompt tokens, the paper's Table 1.
        watched: prompt tokens of the prefill whose indexers are timed.
        pool: tokens of the KV pool of a server that is asked one request.
        full_pool: tokens of the full KV cache.
        new_tokens: of each answer.
        slices: layers of a slice of the model, and of one of GLM-5.
        flags: of every server.
        products: flags for FP8 products, the preferred ones first.
        start_seconds: for which a server's start is waited.
    """

    model: Mapping[str, Any]
    glm_5: Mapping[str, Any]
    patterns: Mapping[str, str]
    lengths: tuple[int, ...]
    watched: int
    pool: int
    full_pool: int
    new_tokens: int
    slices: tuple[int, int]
    flags: tuple[str, ...]
    products: tuple[tuple[str, ...], ...]
    start_seconds: float = 150.0


_COMMON = (
    *("--load-format", "dummy", "--skip-tokenizer-init", "--skip-server-warmup"),
    *("--disable-radix-cache", "--grammar-backend", "none", "--sampling-backend", "pytorch"),
)
_TRITON = ("--moe-runner-backend", "triton")
CARD = Scale(
    model={**SHAPES["30b"], **_FP8},
    glm_5={**one_rank(SHAPES["glm-5"], _RANKS), "first_k_dense_replace": 1, **_FP8},
    patterns={"": "", "1/2": "1/2", "1/4": "1/4", "1/8": "1/8"},
    lengths=(10_000, 60_000, 120_000, 200_000),
    watched=120_000,
    pool=208_896,
    full_pool=819_200,
    new_tokens=64,
    slices=(8, 6),
    flags=(
        *_COMMON,
        *("--kv-cache-dtype", "fp8_e4m3", "--dsa-prefill-backend", "flashmla_sparse"),
        *("--dsa-decode-backend", "flashmla_kv", "--chunked-prefill-size", "8192"),
        *("--context-length", "262144", "--disable-prefill-cuda-graph"),
        *("--mem-fraction-static", "0.9"),
    ),
    # DeepGEMM compiles a kernel for each shape of a product: last, and for index logits alone.
    products=(
        ("--fp8-gemm-backend", "cutlass", *_TRITON),
        ("--fp8-gemm-backend", "triton", *_TRITON),
        (),
    ),
)
"""The paper's model in FP8, as one data-parallel rank of its deployment sees it."""

_SMALL: Mapping[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "num_attention_heads": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 256,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "index_topk": 128,
    "index_n_heads": 8,
    "index_head_dim": 128,
    "vocab_size": 1024,
}
REHEARSAL = Scale(
    model=_SMALL,
    glm_5={**_SMALL, "num_attention_heads": 8},
    patterns={"": "FFFF", "1/2": "FSFS", "1/4": "FSSS", "1/8": "FSSS"},  # stock wants a card
    lengths=(160, 256),
    watched=256,
    pool=1024,
    full_pool=2048,
    new_tokens=6,
    slices=(4, 4),
    flags=(*_COMMON, "--context-length", "8192", "--chunked-prefill-size", "128"),
    products=((),),
    start_seconds=600,
)
"""Four layers with the widths that a card's kernels insist on, for a machine without one."""
