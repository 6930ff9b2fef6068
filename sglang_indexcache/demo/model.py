"""Make a small DSA checkpoint with random weights that transformers and SGLang load unchanged.

The shapes are those of GLM-5 or DeepSeek-V3.2 in small; the weights are seeded noise, so what it
says is noise too, but every layer, every indexer and every file is where a real one has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_indexcache.errors import SettingsError
from sglang_indexcache.models import BY_NAME, SIZES, small_config


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
        spec: what to make.
        folder: created if missing; files of the same name are replaced.

    Returns:
        The number of parameters.

    Raises:
        SettingsError: a vocabulary that is too small.
    """
    from transformers.utils.logging import disable_progress_bar

    from sglang_indexcache.heal.checkpoints import random_model, save_checkpoint
    from sglang_indexcache.support.text import make_tokenizer

    disable_progress_bar()  # it would break the caller's own
    family = BY_NAME[spec.preset]
    config = small_config(family, spec.size, spec.vocab_size, spec.overrides)
    tokenizer = make_tokenizer(spec.vocab_size)
    model = random_model(family, config, tokenizer, spec.seed)
    save_checkpoint(model, model.state_dict(), tokenizer, spec.dtype, folder)
    return sum(parameter.numel() for parameter in model.parameters())
