"""Models and their tokenizers as checkpoint folders: loaded, new, and written.

What is written is a standard checkpoint, which transformers and SGLang load unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from sglang_indexcache.checkpoint import read_config
from sglang_indexcache.errors import TrainingError
from sglang_indexcache.heal.recipe import ModelRecipe
from sglang_indexcache.models import TRAINABLE, Family
from sglang_indexcache.stored import check_trainable_dtypes, take_over
from sglang_indexcache.support.files import write_whole
from sglang_indexcache.support.text import make_tokenizer


def build(
    recipe: ModelRecipe, seed: int, folder: Path
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, in float32 unless the recipe says otherwise, and its tokenizer.

    Args:
        recipe: what to build.
        seed: of random weights.
        folder: where a new tokenizer is kept.

    Raises:
        CheckpointError: a checkpoint that cannot be read.
        TrainingError: a checkpoint with quantised weights.
    """
    if recipe.checkpoint is not None:
        check_trainable_dtypes(recipe.checkpoint)
        return load(recipe.checkpoint, recipe.dtype)
    if not (folder / "tokenizer.json").exists():
        make_tokenizer(recipe.vocab_size).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return random_model(recipe.family, recipe.config(), tokenizer, seed), tokenizer


def random_model(
    family: Family, config: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, seed: int
) -> PreTrainedModel:
    """A model in float32 with random weights.

    Args:
        family: a trainable one.
        config: its HF config fields.
        tokenizer: gives the ids of the end and padding tokens.
        seed: of the weights.
    """
    ends = {
        "bos_token_id": tokenizer.eos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    torch.manual_seed(seed)
    made = AutoConfig.for_model(family.model_type, **{**config, **ends})
    return AutoModelForCausalLM.from_config(made, dtype=torch.float32)


def load(folder: Path, dtype: str = "float32") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A DSA checkpoint in ``dtype`` (a torch dtype's name) and its tokenizer.

    DeepSeek-V3.2's modelling code in transformers knows no sharing and gives every layer an
    indexer; those of S layers have no weights in the checkpoint and must not be used.

    Raises:
        CheckpointError: no readable ``config.json``.
    """
    read_config(folder)  # transformers would look for a folder without one on the internet
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    return model, AutoTokenizer.from_pretrained(folder)


def save_checkpoint(
    model: PreTrainedModel,
    state: dict[str, torch.Tensor],
    tokenizer: PreTrainedTokenizerBase,
    dtype: str | None,
    folder: Path,
    base: Path | None = None,
) -> None:
    """Save weights, config and tokenizer.

    ``indexer_types`` in config.json holds the pattern, and S layers have no indexer weights.
    Tensors of ``base`` that the model does not know (MTP layers) are copied as they are.

    Args:
        model: a transformers DSA model, perhaps from inside a ``DistilledModel``.
        state: its full state dict (gathered, if it is sharded).
        tokenizer: saved beside it.
        dtype: of the stored weights, a torch dtype's name; what transformers keeps in float32
            stays so. None for the dtype that each has in ``base`` (bfloat16 without one).
        folder: created if missing; a checkpoint in it is replaced.
        base: the checkpoint that the model came from.

    Raises:
        TrainingError: ``folder`` is ``base``.
    """
    if base is not None and base.resolve() == folder.resolve():
        raise TrainingError(f"{folder} is the checkpoint that is read; write to another folder")
    for old in folder.glob("model*.safetensors*"):
        old.unlink()
    kept = dtype is None and base is not None
    common = dtype or (_common_dtype(base) if base is not None else "bfloat16")
    common_dtype = getattr(torch, common)
    if not kept:
        in_float32 = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
        state = {
            name: t if any(part in name for part in in_float32) else t.to(common_dtype)
            for name, t in state.items()
        }
    model.save_pretrained(folder, state_dict=state)
    if base is not None:
        layers = tuple(f"model.layers.{i}." for i in range(model.config.num_hidden_layers))
        take_over(
            base,
            folder,
            left_out=lambda name: name.startswith(layers) and ".indexer." in name,
            dtype=common_dtype if kept else None,
        )
    tokenizer.save_pretrained(folder)
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), "dtype": common}
    # transformers >= 5.19 maps num_experts onto n_routed_experts; SGLang reads both.
    experts = model.config.n_routed_experts
    config |= {"n_routed_experts": experts, "num_experts": experts}
    config |= TRAINABLE[model.config.model_type].extra_config
    write_whole(path, json.dumps(config, indent=2) + "\n")


def _common_dtype(checkpoint: Path) -> str:
    """That of most weights, by the config."""
    config = read_config(checkpoint)
    return str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
