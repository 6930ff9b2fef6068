"""Make a small DSA checkpoint with random weights that transformers and SGLang load unchanged.

The shapes are those of GLM-5 or DeepSeek-V3.2 in small; the weights are seeded noise, so what it
says is noise too, but every layer, every indexer and every file is where a real one has it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_indexcache.errors import SettingsError
from sglang_indexcache.models import BY_NAME, SIZES, TRAINABLE, Family, small_config
from sglang_indexcache.support.files import write_whole


@dataclass(frozen=True)
class ModelSpec:
    """What to make.

    Attributes:
        preset: a family's name, a key of :data:`~sglang_indexcache.models.BY_NAME`.
        size: a key of :data:`~sglang_indexcache.models.SIZES`.
        seed: of the weights.
        vocab_size: of the tokenizer and the model.
        dtype: of the stored weights, a torch dtype's name.
        overrides: config fields that replace those of the preset and the size.

    Raises:
        SettingsError: an unknown preset or size.
    """

    preset: str = "glm-5"
    size: str = "small"
    seed: int = 0
    vocab_size: int = 4096
    dtype: str = "bfloat16"
    overrides: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for what, known in (("preset", BY_NAME), ("size", SIZES)):
            if (name := getattr(self, what)) not in known:
                raise SettingsError(f"{what} {name!r} is unknown; there are {' and '.join(known)}")


def make_model(spec: ModelSpec, folder: Path) -> int:
    """Write the checkpoint and its tokenizer.

    Args:
        folder: created if missing; files of the same name are replaced.

    Returns:
        The number of parameters.

    Raises:
        SettingsError: a vocabulary that is too small.
    """
    from transformers.utils.logging import disable_progress_bar

    from sglang_indexcache.support.text import make_tokenizer

    disable_progress_bar()  # it would break the caller's own
    family = BY_NAME[spec.preset]
    config = small_config(family, spec.size, spec.vocab_size, spec.overrides)
    tokenizer = make_tokenizer(spec.vocab_size)
    model = random_model(family, config, tokenizer, spec.seed)
    save_checkpoint(model, tokenizer, spec.dtype, folder)
    return sum(parameter.numel() for parameter in model.parameters())


def random_model(family: Family, config: Mapping[str, Any], tokenizer: Any, seed: int) -> Any:
    """A transformers model in float32 with random weights.

    Args:
        family: a trainable one.
        tokenizer: gives the ids of the end and padding tokens.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    ends = {
        "bos_token_id": tokenizer.eos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    torch.manual_seed(seed)
    made = AutoConfig.for_model(family.model_type, **{**config, **ends})
    return AutoModelForCausalLM.from_config(made, dtype=torch.float32)


def save_checkpoint(model: Any, tokenizer: Any, dtype: str, folder: Path) -> None:
    """Save weights, config and tokenizer so that transformers and SGLang load them unchanged.

    Args:
        dtype: of the stored weights, a torch dtype's name; what transformers keeps in float32
            stays so.
        folder: created if missing; a checkpoint in it is replaced.
    """
    import torch

    for old in folder.glob("model*.safetensors*"):
        old.unlink()
    in_float32 = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    state = {
        name: t if any(part in name for part in in_float32) else t.to(getattr(torch, dtype))
        for name, t in model.state_dict().items()
    }
    model.save_pretrained(folder, state_dict=state)
    tokenizer.save_pretrained(folder)
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), "dtype": dtype}
    # transformers >= 5.19 maps num_experts onto n_routed_experts; SGLang reads both.
    experts = model.config.n_routed_experts
    config |= {"n_routed_experts": experts, "num_experts": experts}
    config |= TRAINABLE[model.config.model_type].extra_config
    write_whole(path, json.dumps(config, indent=2) + "\n")
