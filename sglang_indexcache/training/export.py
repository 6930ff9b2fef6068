"""Write a trained model as a standard checkpoint that transformers and SGLang load unchanged."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sglang_indexcache.demo.model import complete_config
from sglang_indexcache.training.build import MODEL_TYPES


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
        model: the transformers model inside a ``DistilledModel``.
        state: its full state dict (gathered, if it is sharded).
        tokenizer: saved beside it.
        dtype: of the stored weights, a torch dtype's name.
        folder: created if missing; files of the same name are replaced.
    """
    stored = {name: tensor.to(getattr(torch, dtype)) for name, tensor in state.items()}
    model.save_pretrained(folder, state_dict=stored)
    tokenizer.save_pretrained(folder)
    presets = {kind: preset for preset, kind in MODEL_TYPES.items()}
    path = folder / "config.json"
    complete_config(presets[model.config.model_type], model.config.n_routed_experts, path)
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"dtype": dtype}, indent=2) + "\n")
