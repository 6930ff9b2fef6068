"""Parameter groups for AdamW, and a learning rate that rises and falls."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

BETAS = (0.9, 0.98)


def adamw_groups(
    parameters: list[nn.Parameter], lr: float, weight_decay: float
) -> list[dict[str, Any]]:
    """Make groups for AdamW: matrices decay, vectors do not. ``peak_lr`` is for :func:`set_lr`."""
    matrices = [p for p in parameters if p.dim() > 1]
    vectors = [p for p in parameters if p.dim() <= 1]
    return [
        {"params": group, "lr": lr, "peak_lr": lr, "weight_decay": decay}
        for group, decay in ((matrices, weight_decay), (vectors, 0.0))
        if group
    ]


def lr_factor(step: int, steps: int, warmup_steps: int, final_lr: float) -> float:
    """Share of the peak learning rate at ``step``, from 0 on: a rise, then a cosine to the last."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, steps - warmup_steps)
    return final_lr + (1 - final_lr) * 0.5 * (1 + math.cos(math.pi * progress))


def set_lr(optimizers: list[Any], factor: float) -> None:
    """Set every group's learning rate to its peak times ``factor``."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
