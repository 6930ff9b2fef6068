"""A small MiniMax-M3 with random weights, its forward under a pattern by hand, and one to serve.

What each query may see is written anew, with loops over queries and blocks: neither our sharing nor
transformers' indexer, block mask or cache has a part in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    MiniMaxM3SparseForConditionalGeneration,
    MiniMaxM3VLConfig,
    MiniMaxM3VLForCausalLM,
    MiniMaxM3VLTextConfig,
)
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import apply_rotary_pos_emb

SPARSE = (1, 2, 4, 5, 6)
"""Layers with sparse attention, of seven."""
BLOCK, BLOCKS = 8, 3
TEXT: dict[str, Any] = {
    **{"num_hidden_layers": 7, "hidden_size": 64, "vocab_size": 512, "head_dim": 16},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "rotary_dim": 8},
    **{"intermediate_size": 32, "dense_intermediate_size": 48, "shared_intermediate_size": 24},
    **{"num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 512},
    **{"index_n_heads": 2, "index_head_dim": 16, "index_block_size": BLOCK},
    **{"index_topk_blocks": BLOCKS, "index_local_blocks": 1, "initializer_range": 0.3},
    "layer_types": [
        "minimax_m3_sparse" if layer in SPARSE else "full_attention" for layer in range(7)
    ],
    "mlp_layer_types": ["dense", *["sparse"] * 6],
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.5,
    },
    **{"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2},
}
VISION = {
    **{"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "image_size": 28},
}

HEAD, HIDDEN, HEADS, GROUPS, INNER, VOCABULARY = 128, 512, 32, 2, 512, 1024
_ON_CARD = [0, *[1] * 12]
"""1 for each layer whose attention is sparse, 0 for the others."""
ON_CARD: dict[str, Any] = {
    **{"architectures": ["MiniMaxM3SparseForCausalLM"], "model_type": "minimax_m2"},
    **{"dtype": "bfloat16", "num_hidden_layers": 13, "hidden_size": HIDDEN, "head_dim": HEAD},
    **{"num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "vocab_size": VOCABULARY},
    **{"intermediate_size": INNER, "dense_intermediate_size": INNER, "hidden_act": "silu"},
    **{"num_local_experts": 8, "num_experts_per_tok": 2, "moe_layer_freq": [0] * 13},
    **{"max_position_embeddings": 8192, "rope_theta": 5_000_000, "rotary_dim": 64},
    **{"use_qk_norm": True, "qk_norm_type": "per_head", "use_gemma_norm": True},
    **{"tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0},
    "sparse_attention_config": {
        **{"sparse_attention_freq": _ON_CARD, "sparse_disable_index_value": _ON_CARD},
        **{"sparse_index_dim": HEAD, "sparse_num_index_heads": GROUPS, "sparse_block_size": 128},
        **{"sparse_topk_blocks": 16, "sparse_init_block": 0, "sparse_local_block": 1},
    },
}
"""In the widths that SGLang's CUDA kernels are compiled for, as M3 was published; no experts."""


def write_m3(folder: Path) -> Path:
    """Write the checkpoint of :data:`ON_CARD`: 72 million random weights from a fixed seed.

    SGLang's dummy weights would not do: of the same number are the same values, so that every layer
    selects alike and the head, which is the embedding, repeats the last token whatever was read.
    """
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(ON_CARD))
    draw = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=draw).mul_(shape[-1] ** -0.5)
        if len(shape) == 2
        else torch.full(shape, float(name.endswith(".q_norm.weight")))  # sharper attention
        for name, shape in _shapes()
    }
    tensors["model.embed_tokens.weight"] *= HIDDEN**0.5
    save_file({n: tensor.bfloat16() for n, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def _shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield each weight's published name and its shape; a norm's is what it adds to one."""
    yield from (
        (f"{name}.weight", (VOCABULARY, HIDDEN)) for name in ("model.embed_tokens", "lm_head")
    )
    yield "model.norm.weight", (HIDDEN,)
    for layer, is_sparse in enumerate(_ON_CARD):
        shapes: dict[str, tuple[int, ...]] = {
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
            **{f"mlp.{name}_proj": (INNER, HIDDEN) for name in ("gate", "up")},
            "mlp.down_proj": (HIDDEN, INNER),
            "self_attn.q_proj": (HEADS * HEAD, HIDDEN),
            **{f"self_attn.{name}_proj": (GROUPS * HEAD, HIDDEN) for name in "kv"},
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
            **{f"self_attn.{name}_norm": (HEAD,) for name in "qk"},
        }
        if is_sparse:
            shapes |= {
                "self_attn.index_q_proj": (GROUPS * HEAD, HIDDEN),
                "self_attn.index_k_proj": (HEAD, HIDDEN),
                **{f"self_attn.index_{name}_norm": (HEAD,) for name in "qk"},
            }
        for name, shape in shapes.items():
            yield f"model.layers.{layer}.{name}.weight", shape


def make_m3(*, multimodal: bool = False) -> Any:
    """Make the language model, or the whole; with the same seed, so not with the same weights."""
    torch.manual_seed(0)
    if not multimodal:
        return MiniMaxM3VLForCausalLM._from_config(
            MiniMaxM3VLTextConfig(**TEXT), attn_implementation="eager"
        ).eval()
    config = MiniMaxM3VLConfig(text_config=dict(TEXT), vision_config=VISION)
    return MiniMaxM3SparseForConditionalGeneration._from_config(
        config, attn_implementation="eager"
    ).eval()


@torch.no_grad()
def by_hand(model: Any, ids: torch.Tensor, pattern: str) -> torch.Tensor:
    """``[T, vocab]`` logits of one sequence ``[T]``, ``pattern`` with a letter a sparse layer."""
    decoder, letters = model.get_decoder(), iter(pattern)
    hidden = decoder.embed_tokens(ids[None])
    turn = decoder.rotary_emb(hidden, position_ids=torch.arange(len(ids))[None])
    causal = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    selection = causal
    for layer in decoder.layers:
        attention, inputs = layer.self_attn, layer.input_layernorm(hidden)
        visible = causal
        if attention.indexer is not None:
            if next(letters) == "F":
                selection = selected_blocks(attention.indexer, inputs, turn) & causal
            visible = selection  # [groups, T, T]
        hidden = hidden + attention.o_proj(_attend(attention, inputs, turn, visible))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    logits: torch.Tensor = model.lm_head(decoder.norm(hidden))[0]
    return logits


def selected_blocks(indexer: Any, inputs: torch.Tensor, turn: Any) -> torch.Tensor:
    """``[groups, T, T]``: which keys are in the blocks that each query of a group chooses."""
    length = inputs.shape[1]
    queries = indexer.q_norm(indexer.q_proj(inputs).view(1, length, -1, 16)).transpose(1, 2)
    keys = indexer.k_norm(indexer.k_proj(inputs).view(1, length, 1, 16)).transpose(1, 2)
    queries, keys = apply_rotary_pos_emb(queries, keys, *turn)
    scores = (queries @ keys.transpose(-1, -2))[0]
    result = torch.zeros(scores.shape, dtype=torch.bool)
    for group in range(len(scores)):
        for query in range(length):
            row = scores[group, query, : query + 1].tolist()
            best = [max(row[start : start + BLOCK]) for start in range(0, query + 1, BLOCK)]
            best[-1] = float("inf")  # the query's own block
            ranked = sorted(range(len(best)), key=best.__getitem__, reverse=True)
            for block in ranked[:BLOCKS]:
                result[group, query, block * BLOCK : (block + 1) * BLOCK] = True
    return result


def _attend(attention: Any, inputs: torch.Tensor, turn: Any, visible: torch.Tensor) -> torch.Tensor:
    """``[1, T, heads * 16]``: attention to what is ``visible``, by head or by group."""
    length = inputs.shape[1]
    q = attention.q_norm(attention.q_proj(inputs).view(1, length, 4, 16)).transpose(1, 2)
    k = attention.k_norm(attention.k_proj(inputs).view(1, length, 2, 16)).transpose(1, 2)
    values = attention.v_proj(inputs).view(length, 2, 16)
    q, k = apply_rotary_pos_emb(q, k, *turn)
    heads = []
    for head in range(4):
        group = head // 2
        scores = q[0, head] @ k[0, group].T / 4
        mask = visible if visible.ndim == 2 else visible[group]
        heads.append(scores.masked_fill(~mask, -torch.inf).softmax(-1) @ values[:, group])
    return torch.cat(heads, dim=-1)[None]
