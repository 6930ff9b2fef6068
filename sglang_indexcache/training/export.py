"""Write a trained model as a standard checkpoint that transformers and SGLang load unchanged."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sglang_indexcache.models import TRAINABLE
from sglang_indexcache.support.files import write_whole

# What SGLang reads and transformers' config classes do not write. Real checkpoints have it.
_FOR_SGLANG = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}


def save_checkpoint(
    model: PreTrainedModel,
    state: dict[str, torch.Tensor],
    tokenizer: PreTrainedTokenizerBase,
    dtype: str,
    folder: Path,
) -> None:
    """Save weights, config and tokenizer.

    ``indexer_types`` in config.json holds the pattern, and S layers have no indexer weights.

    Args:
        model: a transformers DSA model, perhaps from inside a ``DistilledModel``.
        state: its full state dict (gathered, if it is sharded).
        tokenizer: saved beside it.
        dtype: of the stored weights, a torch dtype's name.
        folder: created if missing; files of the same name are replaced.
    """
    stored = {name: tensor.to(getattr(torch, dtype)) for name, tensor in state.items()}
    model.save_pretrained(folder, state_dict=stored)
    tokenizer.save_pretrained(folder)
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), "dtype": dtype, **_FOR_SGLANG}
    # transformers >= 5.19 maps num_experts onto n_routed_experts; SGLang reads both.
    experts = model.config.n_routed_experts
    config |= {"n_routed_experts": experts, "num_experts": experts}
    config |= TRAINABLE[model.config.model_type].extra_config
    write_whole(path, json.dumps(config, indent=2) + "\n")
