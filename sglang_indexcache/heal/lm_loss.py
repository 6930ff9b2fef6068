"""The LM loss a chunk of tokens at a time: the logits of a long row would not fit."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from sglang_indexcache.heal.packing import IGNORED

CHUNK = 1024
"""Tokens whose logits are there at a time."""

Head = Callable[[torch.Tensor], torch.Tensor]


def next_token_losses(
    hidden: torch.Tensor, head: Head, targets: torch.Tensor, chunk: int = CHUNK
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy of every labelled token, with a gradient, and whether it was predicted.

    Logits are made for labelled tokens only, ``chunk`` of them at a time, and again in the
    backward pass; they are compared in at least float32.

    Args:
        hidden: ``[B, T, hidden_size]``, what the LM head reads.
        head: gives logits, ``[..., vocab]``.
        targets: ``[B, T]`` int64, the next token or :data:`IGNORED`.
        chunk: tokens at a time.

    Returns:
        ``[B, T]`` nats in at least float32, 0 where nothing is labelled; and ``[B, T]`` bool,
        whether the most probable token is the target.
    """
    labelled = targets != IGNORED
    parts = [
        checkpoint(_chunk, rows, head, right, use_reentrant=False, preserve_rng_state=False)
        for rows, right in zip(
            torch.split(hidden[labelled], chunk),
            torch.split(targets[labelled], chunk),
            strict=True,
        )
    ]
    nats, hits = (torch.cat(part) for part in zip(*parts, strict=True))
    return (
        nats.new_zeros(targets.shape).masked_scatter(labelled, nats),
        torch.zeros_like(labelled).masked_scatter(labelled, hits),
    )


def _chunk(
    hidden: torch.Tensor, head: Head, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = head(hidden)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return cross_entropy(logits, targets, reduction="none"), logits.argmax(-1) == targets
