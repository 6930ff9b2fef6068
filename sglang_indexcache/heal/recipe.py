"""A training run, described by a YAML file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sglang_indexcache.checkpoint import Checkpoint
from sglang_indexcache.errors import TrainingError
from sglang_indexcache.heal.losses import LossKernel
from sglang_indexcache.library import Library
from sglang_indexcache.models import BY_NAME, Family, small_config
from sglang_indexcache.pattern import Pattern


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelRecipe(_Part):
    """Where the model comes from: a checkpoint folder, or a preset with random weights.

    Attributes:
        checkpoint: a DSA checkpoint with its tokenizer.
        dtype: "float32", or "bfloat16" to hold a checkpoint's frozen weights in half the memory, in
            runs that train nothing but indexers; those are held in float32 either way.
        preset: a family's name, a key of :data:`~sglang_indexcache.models.BY_NAME`.
        fields: HF config fields of a new model.
        vocab_size: of a new model's tokenizer.
    """

    checkpoint: Path | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    preset: str = "glm-5"
    fields: dict[str, Any] = Field(default_factory=dict)
    vocab_size: int = Field(default=1024, ge=261)

    @model_validator(mode="after")
    def _one_source(self) -> ModelRecipe:
        if self.checkpoint is not None and self.fields:
            raise ValueError("give model.checkpoint or model.fields, not both")
        if self.checkpoint is None and self.dtype != "float32":
            raise ValueError("model.dtype is for a checkpoint's weights; give model.checkpoint")
        if self.preset not in BY_NAME:
            raise ValueError(f"model.preset is {self.preset!r}; there are {', '.join(BY_NAME)}")
        return self

    @property
    def family(self) -> Family:
        """The family of a new model."""
        return BY_NAME[self.preset]

    def config(self) -> dict[str, Any]:
        """The HF config fields of a new model."""
        return small_config(self.family, "tiny", self.vocab_size, self.fields)

    def read(self) -> Checkpoint:
        """What is known of the model without its weights.

        Raises:
            CheckpointError: a checkpoint that cannot be read, or a model without indexers.
        """
        if self.checkpoint is not None:
            return Checkpoint.read(self.checkpoint)
        return Checkpoint.from_config(self.config(), "the recipe's model")


class DataRecipe(_Part):
    """What is trained on.

    Attributes:
        text_characters: of the standard library's sources, at most.
        mixture: share of the rows by task: text, recall, needles, tracking, files.
        files: what "files" is: .jsonl, .parquet or text files, or folders of them. Conversations
            are written by the chat template, and where answers are marked only those are learned.
        lengths: document lengths of the retrieval tasks, tokens.
    """

    text_characters: int = Field(default=4_000_000, ge=1)
    mixture: dict[str, float]
    lengths: list[int] = Field(min_length=1)
    files: list[str] = Field(default_factory=list)

    @model_validator(mode="after")
    def _files_are_used(self) -> DataRecipe:
        if bool(self.files) != ("files" in self.mixture):
            raise ValueError("data.files and data.mixture.files (their share) belong together")
        return self


class StageRecipe(_Part):
    """One stage.

    Attributes:
        kind: "dense", "warmup" or "sparse".
        steps: optimiser steps.
        rows: rows of a step over all processes.
        micro_rows: rows of one backward pass in one process; all of them if None.
        length: tokens per row.
        lr: peak learning rate of everything but the indexers.
        muon_lr: with "muon", peak learning rate of the body's matrices, on AdamW's scale; ``lr``
            if None.
        indexer_lr: peak learning rate of the indexers.
        optimizer: "adamw", or "muon" for the body's matrices with AdamW for the rest.
        warmup_steps: linear rise of the learning rates.
        final_lr: share of the peak that a cosine falls to.
        data: replaces the run's data for this stage.
        topk: replaces the model's index_topk for this stage.
    """

    kind: Literal["dense", "warmup", "sparse"]
    steps: int = Field(ge=1)
    rows: int = Field(ge=1)
    micro_rows: int | None = Field(default=None, ge=1)
    length: int = Field(ge=2)
    lr: float = Field(default=1e-3, gt=0)
    indexer_lr: float = Field(default=1e-3, gt=0)
    optimizer: Literal["adamw", "muon"] = "adamw"
    muon_lr: float | None = Field(default=None, gt=0)
    warmup_steps: int = Field(default=50, ge=0)
    final_lr: float = Field(default=0.1, ge=0, le=1)
    data: DataRecipe | None = None
    topk: int | None = Field(default=None, ge=1)


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
        loss_kernel: of the distillation loss in sparse stages: "torch", or "triton" on a GPU.
        gradient_checkpointing: recompute layers in the backward pass.
        save_every: steps between resumable states.
        log_every: steps between log lines.
        eval_every: steps between evaluations on held-out data; 0 for the end of stages only.
        eval_rows: rows of each task in an evaluation.
        tensorboard: write TensorBoard events as well.
        dtype: of the stored checkpoint; if None that which each tensor has in the checkpoint
            that training started from, and bfloat16 for a new model.
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
    loss_kernel: LossKernel = LossKernel.TORCH
    gradient_checkpointing: bool = False
    save_every: int = Field(default=100, ge=1)
    log_every: int = Field(default=10, ge=1)
    eval_every: int = Field(default=0, ge=0)
    eval_rows: int = Field(default=16, ge=1)
    tensorboard: bool = False
    dtype: Literal["bfloat16", "float16", "float32"] | None = None

    @model_validator(mode="after")
    def _full_precision_is_trained(self) -> Recipe:
        others = {stage.kind for stage in self.stages} - {"warmup"}
        if self.model.dtype != "float32" and others:
            raise ValueError(
                f"model.dtype is {self.model.dtype}, but a {min(others)} stage trains those "
                "weights: leave model.dtype out, or keep to warmup stages"
            )
        return self

    @model_validator(mode="after")
    def _a_kernel_is_used(self) -> Recipe:
        if self.loss_kernel is not LossKernel.TORCH and not any(
            stage.kind == "sparse" for stage in self.stages
        ):
            raise ValueError(
                f"loss_kernel is {self.loss_kernel}, which is for sparse stages, and there is "
                "none: leave it out"
            )
        return self

    def resolved_pattern(self) -> Pattern:
        """The pattern for the recipe's model, known before anything is built.

        Raises:
            PatternError, LibraryError: not a pattern, or one that does not fit the model.
            CheckpointError: a model that cannot be read, or without indexers.
        """
        return Library.default().resolve(self.pattern, self.model.read()).pattern

    def first(self, stages: int) -> Recipe:
        """The recipe that ends after its first ``stages`` stages.

        Raises:
            TrainingError: it does not have so many, or none was asked for.
        """
        if not 1 <= stages <= len(self.stages):
            raise TrainingError(f"{stages} stages: the recipe has 1 to {len(self.stages)}")
        return self.model_copy(update={"stages": self.stages[:stages]})


def shipped_recipes() -> dict[str, Path]:
    """The recipes that come with the package, by name."""
    return {path.stem: path for path in sorted((Path(__file__).parent / "recipes").glob("*.yaml"))}


def load_recipe(name: str | Path, overrides: dict[str, Any] | None = None) -> Recipe:
    """Read and check a recipe.

    Args:
        name: a YAML file, or the name of a shipped recipe.
        overrides: top-level fields that replace the file's.

    Raises:
        TrainingError: unreadable, not YAML, or a field that is wrong; names the field.
    """
    path = shipped_recipes().get(str(name), Path(name))
    if not path.exists():
        raise TrainingError(
            f"there is no recipe {name}: give a YAML file, or one of {', '.join(shipped_recipes())}"
        )
    try:
        raw = yaml.safe_load(path.read_text())
    except OSError as error:
        raise TrainingError(f"cannot read the recipe {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise TrainingError(f"{path} is not YAML: {error}") from error
    if not isinstance(raw, dict):
        raise TrainingError(f"{path} holds no recipe: it needs model, data and stages")
    try:
        return Recipe.model_validate({**raw, **(overrides or {})})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        raise TrainingError(f"{path}: {where}: {first['msg']}{more}") from error
