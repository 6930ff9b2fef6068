"""A training run, described by a YAML file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from benchmarks.random_model import small_config
from benchmarks.training.tasks import TASKS
from sglang_indexcache.checkpoint import Checkpoint
from sglang_indexcache.errors import TrainingError
from sglang_indexcache.library.resolve import Library
from sglang_indexcache.models import BY_NAME, Family
from sglang_indexcache.pattern import Pattern

RECIPES = Path(__file__).parent / "recipes"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelRecipe(_Part):
    """Origin of the model: a checkpoint folder, or a preset with random weights.

    Attributes:
        checkpoint: a DSA checkpoint with its tokenizer.
        preset: a family's name, a key of :data:`~sglang_indexcache.models.BY_NAME`.
        fields: HF config fields of a new model.
        vocab_size: of a new model's tokenizer.
    """

    checkpoint: Path | None = None
    preset: Literal[*BY_NAME] = "glm-5"  # type: ignore[valid-type]
    fields: dict[str, Any] = Field(default_factory=dict)
    vocab_size: int = Field(default=1024, ge=261)

    @model_validator(mode="after")
    def _one_source(self) -> ModelRecipe:
        if self.checkpoint is not None and self.fields:
            raise ValueError("give model.checkpoint or model.fields, not both")
        return self

    @property
    def family(self) -> Family:
        """The family of a new model."""
        return BY_NAME[self.preset]

    def config(self) -> dict[str, Any]:
        """Return the HF config fields of a new model."""
        return small_config(self.family, "tiny", self.vocab_size, self.fields)

    def read(self) -> Checkpoint:
        """Return what is known of the model without its weights."""
        if self.checkpoint is not None:
            return Checkpoint.read(self.checkpoint)
        return Checkpoint.from_config(self.config(), "the recipe's model")


class DataRecipe(_Part):
    """Data that is trained on.

    Attributes:
        text_characters: of the standard library's sources, at most.
        mixture: share of the rows by task: text, or a name in ``TASKS``.
        lengths: document lengths of the retrieval tasks, tokens.
    """

    text_characters: int = Field(default=4_000_000, ge=1)
    mixture: dict[Literal["text", *TASKS], float]  # type: ignore[valid-type]
    lengths: list[int] = Field(min_length=1)


class StageRecipe(_Part):
    """One stage.

    Attributes:
        kind: "dense", "warmup" or "sparse".
        steps: optimiser steps.
        rows: rows of a step.
        length: tokens per row.
        lr: peak learning rate of everything but the indexers.
        muon_lr: with "muon", peak learning rate of the body's matrices, on AdamW's scale; ``lr``
            if None.
        indexer_lr: peak learning rate of the indexers.
        optimizer: "adamw", or "muon" for the body's matrices with AdamW for the rest.
        warmup_steps: linear rise of the learning rates.
        final_lr: share of the peak that a cosine falls to.
        data: replaces the run's data for this stage.
    """

    kind: Literal["dense", "warmup", "sparse"]
    steps: int = Field(ge=1)
    rows: int = Field(ge=1)
    length: int = Field(ge=2)
    lr: float = Field(default=1e-3, gt=0)
    indexer_lr: float = Field(default=1e-3, gt=0)
    optimizer: Literal["adamw", "muon"] = "adamw"
    muon_lr: float | None = Field(default=None, gt=0)
    warmup_steps: int = Field(default=50, ge=0)
    final_lr: float = Field(default=0.1, ge=0, le=1)
    data: DataRecipe | None = None


class Recipe(_Part):
    """A whole run.

    Attributes:
        model: what is trained.
        pattern: in any form that the pattern library resolves.
        cross_layer: distil indexers for all layers they serve (L_multi) or their own only.
        stages: run one after the other.
        data: unless a stage has its own.
        seed: of weights and data.
        weight_decay: of AdamW and Muon, matrices only.
        clip: largest gradient norm, separately for indexers and body.
        block: queries per block of chunked work.
        save_every: steps between resumable states.
        log_every: steps between log lines.
        eval_every: steps between evaluations on held-out data; 0 for the end of stages only.
        eval_rows: rows of each task in an evaluation.
        dtype: of the stored checkpoint.
    """

    model: ModelRecipe
    pattern: str = "full"
    cross_layer: bool = True
    stages: list[StageRecipe] = Field(min_length=1)
    data: DataRecipe
    seed: int = 0
    weight_decay: float = Field(default=0.01, ge=0)
    clip: float = Field(default=1.0, gt=0)
    block: int = Field(default=256, ge=1)
    save_every: int = Field(default=100, ge=1)
    log_every: int = Field(default=10, ge=1)
    eval_every: int = Field(default=0, ge=0)
    eval_rows: int = Field(default=16, ge=1)
    dtype: Literal["bfloat16", "float32"] = "bfloat16"

    @model_validator(mode="after")
    def _lengths_fit(self) -> Recipe:
        for number, stage in enumerate(self.stages):
            data = stage.data or self.data
            if min(data.lengths) > stage.length and set(data.mixture) != {"text"}:
                raise ValueError(
                    f"stages.{number} has rows of {stage.length} tokens, but no entry of its "
                    f"data.lengths ({data.lengths}) fits"
                )
        return self

    def resolved_pattern(self) -> Pattern:
        """Return the pattern for the recipe's model, known before anything is built."""
        return Library.default().resolve(self.pattern, self.model.read()).pattern


def load_recipe(name: str | Path, overrides: dict[str, Any] | None = None) -> Recipe:
    """Read and check a recipe.

    Args:
        name: a YAML file, or the name of one in ``recipes/``.
        overrides: top-level fields that replace the file's.

    Raises:
        TrainingError: no such file, or a field that is wrong; names the field.
    """
    shipped = RECIPES / f"{name}.yaml"
    path = shipped if shipped.exists() else Path(name)
    if not path.exists():
        names = ", ".join(sorted(recipe.stem for recipe in RECIPES.glob("*.yaml")))
        raise TrainingError(f"there is no recipe {name}: give a YAML file, or one of {names}")
    try:
        return Recipe.model_validate({**yaml.safe_load(path.read_text()), **(overrides or {})})
    except ValidationError as error:
        raise TrainingError(f"{path}: {error}") from error
