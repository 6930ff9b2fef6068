"""Make the model and the tokenizer that a recipe names."""

from __future__ import annotations

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

from sglang_indexcache.demo.model import ModelSpec, make_tokenizer
from sglang_indexcache.errors import TrainingError
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.training.recipe import ModelRecipe

MODEL_TYPES = {"glm-5": "glm_moe_dsa", "deepseek-v3.2": "deepseek_v32"}


def build(
    recipe: ModelRecipe, seed: int, folder: Path
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in float32 and its tokenizer.

    Args:
        recipe: what to build.
        seed: of random weights.
        folder: where a new tokenizer is kept.

    Raises:
        TrainingError: a checkpoint that cannot be read.
    """
    if recipe.checkpoint is not None:
        return load(recipe.checkpoint)
    if not (folder / "tokenizer.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        make_tokenizer(recipe.vocab_size, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ends = {
        "bos_token_id": tokenizer.eos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    spec = ModelSpec(recipe.preset, "tiny", seed, recipe.vocab_size, "float32", recipe.fields)
    fields = {**spec.config_fields(), **ends}
    torch.manual_seed(seed)
    config = AutoConfig.for_model(MODEL_TYPES[recipe.preset], **fields)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32), tokenizer


def load(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A DSA checkpoint in float32 and its tokenizer; its sharing is ``config.indexer_types``.

    DeepSeek-V3.2's modelling code in transformers knows no sharing and gives every layer an
    indexer; those of S layers have no weights in the checkpoint and must not be used.
    """
    read_config(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(folder)


def read_config(folder: Path) -> Any:
    """The HF config of a checkpoint folder.

    Raises:
        TrainingError: no config there.
    """
    if not (folder / "config.json").exists():
        raise TrainingError(f"{folder} is not a checkpoint: it has no config.json")
    return AutoConfig.from_pretrained(folder)


def own_pattern(config: Any) -> Pattern:
    """The sharing that a model's config states; all F if none."""
    types = getattr(config, "indexer_types", None)
    if types is None:
        return Pattern.full(config.num_hidden_layers)
    return Pattern.from_indexer_types(types)
