"""Optimisers and learning rates; the indexers have their own, as the two losses share nothing."""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import nn

from sglang_indexcache.heal.model import DistilledModel
from sglang_indexcache.heal.recipe import StageRecipe

BETAS = (0.9, 0.98)


def make_optimizers(
    model: DistilledModel, stage: StageRecipe, weight_decay: float
) -> list[torch.optim.Optimizer]:
    """Optimisers over what the stage trains; every group remembers its peak as ``peak_lr``.

    Args:
        model: with the stage's parameters unfrozen.
        stage: names the optimiser and the learning rates.
        weight_decay: for matrices.
    """
    indexer = [p for p in model.indexer_parameters() if p.requires_grad]
    body = [(n, p) for n, p in model.named_body_parameters() if p.requires_grad]
    muon = [p for n, p in body if stage.optimizer == "muon" and _hidden_matrix(n, p)]
    chosen = {id(p) for p in muon}
    rest = [p for _, p in body if id(p) not in chosen]
    groups = adamw_groups(rest, stage.lr, weight_decay)
    groups += adamw_groups(indexer, stage.indexer_lr, weight_decay)
    optimizers: list[torch.optim.Optimizer] = []
    if groups:
        optimizers.append(torch.optim.AdamW(groups, betas=BETAS))
    if muon:
        # Scaled so that a learning rate means what it means for AdamW.
        optimizers.append(
            torch.optim.Muon(
                muon,
                lr=stage.muon_lr or stage.lr,
                weight_decay=weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    remember_peaks(optimizers)
    return optimizers


def remember_peaks(optimizers: list[torch.optim.Optimizer]) -> None:
    """Note every group's learning rate as its ``peak_lr``."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]


def _hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    return parameter.dim() == 2 and "embed_tokens" not in name and "lm_head" not in name


def adamw_groups(
    parameters: list[nn.Parameter], lr: float, weight_decay: float
) -> list[dict[str, Any]]:
    """Groups for AdamW: matrices decay, vectors do not."""
    matrices = [p for p in parameters if p.dim() > 1]
    vectors = [p for p in parameters if p.dim() <= 1]
    groups = [
        {"params": matrices, "lr": lr, "weight_decay": weight_decay},
        {"params": vectors, "lr": lr, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


class Schedule(Protocol):
    """What a learning rate follows; see :class:`StageRecipe`."""

    @property
    def steps(self) -> int:
        """Of all."""

    @property
    def warmup_steps(self) -> int:
        """Of the linear rise."""

    @property
    def final_lr(self) -> float:
        """Share of the peak that the cosine falls to."""


def lr_factor(step: int, stage: Schedule) -> float:
    """Share of the peak learning rate at ``step``, counted from 0: a rise, then a cosine."""
    if step < stage.warmup_steps:
        return (step + 1) / stage.warmup_steps
    progress = (step - stage.warmup_steps) / max(1, stage.steps - stage.warmup_steps)
    return stage.final_lr + (1 - stage.final_lr) * 0.5 * (1 + math.cos(math.pi * progress))


def set_lr(optimizers: list[Any], factor: float) -> None:
    """Set every group to its peak times ``factor``."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
