"""A small GLM-5-shaped checkpoint of a card's widths, on which a comparison means something.

Its weights are noise, but tame: experts are weighed and never chosen between, so rounding flips
none of them, and the head is sharp enough that answers are no coin tosses. SGLang's Hopper path
wants an ``index_topk`` of 2,048; the references take 128, so that prompts of 300 tokens select.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GlmMoeDsaConfig

TOPK = 128
LAYERS = 6
VOCAB = 1024
_TOKENIZER = Path(__file__).parents[2] / "sglang_indexcache" / "demo" / "tiny-dsa"


def make(folder: Path) -> Path:
    """Write the checkpoint: 6 layers, 8 heads, bfloat16, 50 MB.

    The widths that kernels insist on are a card's: latents of 512 and 64, index keys of 128.
    """
    config = GlmMoeDsaConfig(
        num_hidden_layers=LAYERS,
        hidden_size=256,
        intermediate_size=256,
        moe_intermediate_size=128,
        num_attention_heads=8,
        num_key_value_heads=8,
        n_routed_experts=4,
        num_experts_per_tok=4,
        n_shared_experts=1,
        first_k_dense_replace=LAYERS - 2,
        q_lora_rank=256,
        kv_lora_rank=512,
        qk_nope_head_dim=192,
        qk_rope_head_dim=64,
        v_head_dim=256,
        vocab_size=VOCAB,
        index_topk=TOPK,
        index_n_heads=8,
        index_head_dim=128,
        max_position_embeddings=8192,
        architectures=["GlmMoeDsaForCausalLM"],
        moe_layer_freq=1,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        indexer_rope_interleave=True,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0, 1.0 if "embed" in name else weight.shape[-1] ** -0.5)
            if "lm_head" in name:
                weight.mul_(4)
        for name, buffer in model.named_buffers():
            if "e_score_correction_bias" in name:
                buffer.normal_(0, 0.05)
    model.to(torch.bfloat16).save_pretrained(folder)
    config.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(_TOKENIZER / name, folder)
    return folder
