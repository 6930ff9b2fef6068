"""A small MiniMax-M3 with random weights, and its forward under a pattern, by hand.

What each query may see is written anew, with loops over queries and blocks: neither our sharing nor
transformers' indexer, block mask or cache has a part in it.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    MiniMaxM3SparseForConditionalGeneration,
    MiniMaxM3VLConfig,
    MiniMaxM3VLForCausalLM,
    MiniMaxM3VLTextConfig,
)
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import apply_rotary_pos_emb

SPARSE = (1, 2, 4, 5, 6)
"""Of seven layers."""
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
    seen = causal
    for layer in decoder.layers:
        attention, read = layer.self_attn, layer.input_layernorm(hidden)
        visible = causal
        if attention.indexer is not None:
            if next(letters) == "F":
                seen = chosen(attention.indexer, read, turn) & causal
            visible = seen  # [groups, T, T]
        hidden = hidden + attention.o_proj(_attend(attention, read, turn, visible))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    logits: torch.Tensor = model.lm_head(decoder.norm(hidden))[0]
    return logits


def chosen(indexer: Any, read: torch.Tensor, turn: Any) -> torch.Tensor:
    """``[groups, T, T]``: which keys are in the blocks that each query of a group chooses."""
    length = read.shape[1]
    queries = indexer.q_norm(indexer.q_proj(read).view(1, length, -1, 16)).transpose(1, 2)
    keys = indexer.k_norm(indexer.k_proj(read).view(1, length, 1, 16)).transpose(1, 2)
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


def _attend(attention: Any, read: torch.Tensor, turn: Any, visible: torch.Tensor) -> torch.Tensor:
    """``[1, T, heads * 16]``: attention to what is ``visible``, by head or by group."""
    length = read.shape[1]
    q = attention.q_norm(attention.q_proj(read).view(1, length, 4, 16)).transpose(1, 2)
    k = attention.k_norm(attention.k_proj(read).view(1, length, 2, 16)).transpose(1, 2)
    values = attention.v_proj(read).view(length, 2, 16)
    q, k = apply_rotary_pos_emb(q, k, *turn)
    heads = []
    for head in range(4):
        group = head // 2
        scores = q[0, head] @ k[0, group].T / 4
        mask = visible if visible.ndim == 2 else visible[group]
        heads.append(scores.masked_fill(~mask, -torch.inf).softmax(-1) @ values[:, group])
    return torch.cat(heads, dim=-1)[None]
