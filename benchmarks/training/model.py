"""A transformers DSA model that is trained as a whole: LM loss for the body, L_multi for indexers.

Parameters keep their names, so what is saved is a standard checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from benchmarks.training.batches import IGNORED
from sglang_indexcache.lab.heal.forward_state import Sharing, Stage
from sglang_indexcache.lab.heal.losses import DEFAULT_BLOCK, AttentionInputs
from sglang_indexcache.lab.heal.model import install, is_indexer
from sglang_indexcache.lab.heal.packing import Layout
from sglang_indexcache.pattern import Pattern

CHUNK = 1024
"""Tokens whose logits are there at a time."""

Head = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Losses:
    """Sums, so that processes and micro-batches can be added up.

    Attributes:
        lm: cross entropy summed over the labelled tokens, nats; scalar. 0 in the warm-up stage,
            which does not use it.
        lm_tokens: how many; int64 scalar.
        index: ``[layers]`` distillation loss of every layer summed over its queries, each layer
            weighted by 1/(m+1) as in L_multi; zeros where nothing is distilled.
        queries: how many queries that is for each layer; int64 scalar.
        token_nats: ``[B, T]`` cross entropy of each token's successor, detached; 0 where that is
            not labelled.
        token_hits: ``[B, T]`` bool, whether the successor is labelled and the most probable one.
    """

    lm: torch.Tensor
    lm_tokens: torch.Tensor
    index: torch.Tensor
    queries: torch.Tensor
    token_nats: torch.Tensor
    token_hits: torch.Tensor


class OwnLayerSharing(Sharing):
    """Distils each indexer for its own layer alone, at full weight: the paper's ablation."""

    def distil(self, layer: int, attention: AttentionInputs) -> None:
        """Distil as :meth:`Sharing.distil`, in F layers."""
        run = self.running()
        if self.pattern.is_full(layer) and run.stage is not Stage.DENSE and layer not in run.losses:
            super().distil(layer, attention)
            run.losses[layer] = run.losses[layer] * self.pattern.sources.count(layer)


class DistilledModel(nn.Module):
    """A DSA model whose S layers have no indexer and whose F layers' indexers are distilled.

    The indexers get distillation gradients only, everything else LM gradients only.

    Args:
        model: a freshly loaded transformers DSA model; its S layers' indexers are removed.
        pattern: one character per layer.
        cross_layer: L_multi if true; each indexer against its own layer only if false.
        block: queries per block of chunked work.

    Raises:
        TrainingError: a model of another type.
        PatternError: a pattern of the wrong length, or F where the checkpoint has no indexer.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        pattern: Pattern,
        cross_layer: bool = True,
        block: int = DEFAULT_BLOCK,
    ) -> None:
        super().__init__()
        self.model = model
        self.pattern = pattern
        kind = Sharing if cross_layer else OwnLayerSharing
        self.sharing = kind(pattern, model.config.index_topk, block)
        install(model, pattern, self.sharing)

    def forward(
        self,
        ids: torch.Tensor,
        labels: torch.Tensor,
        documents: torch.Tensor,
        positions: torch.Tensor,
        stage: Stage,
    ) -> Losses:
        """Run the model and return its losses.

        Args:
            ids: ``[B, T]`` int64.
            labels: ``[B, T]`` int64, not shifted; -100 counts in no loss.
            documents: ``[B, T]`` integers, see :class:`Layout`.
            positions: ``[B, T]`` int64, counted from 0 in each document.
            stage: which attention and which distillation.
        """
        hidden = self.hidden(ids, documents, positions, stage)
        run = self.sharing.running()
        targets = next_tokens(labels, documents)
        if stage is Stage.WARMUP:
            targets = torch.full_like(targets, IGNORED)
        nats, hits = next_token_losses(hidden, self.model.lm_head, targets)
        none = nats.new_zeros(())
        return Losses(
            lm=nats.sum(),
            lm_tokens=(targets != IGNORED).sum(),
            index=torch.stack([run.losses.get(i, none) for i in range(len(self.pattern))]),
            queries=run.layout.counted.sum(),
            token_nats=nats.detach(),
            token_hits=hits,
        )

    def hidden(
        self,
        ids: torch.Tensor,
        documents: torch.Tensor,
        positions: torch.Tensor,
        stage: Stage,
    ) -> torch.Tensor:
        """Return ``[B, T, hidden_size]``, which the LM head reads; :meth:`forward`'s arguments."""
        self.sharing.start(stage, Layout(documents))
        # Never read: attention and indexers mask by the layout, block by block.
        no_mask = {"indexed_attention": documents.new_empty((1, 1, 1, 1))}
        hidden: torch.Tensor = self.model.model(
            input_ids=ids, attention_mask=no_mask, position_ids=positions, use_cache=False
        ).last_hidden_state
        return hidden

    def indexer_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that distillation trains."""
        return [p for name, p in self.named_parameters() if is_indexer(name)]

    def body_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that the LM loss trains."""
        return [p for _, p in self.named_body_parameters()]

    def named_body_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return the same with their names."""
        return [(name, p) for name, p in self.named_parameters() if not is_indexer(name)]

    def prepare_stage(self, stage: Stage) -> None:
        """Freeze what ``stage`` does not train."""
        for parameter in self.indexer_parameters():
            parameter.requires_grad_(stage is not Stage.DENSE)
        for parameter in self.body_parameters():
            parameter.requires_grad_(stage is not Stage.WARMUP)


def next_tokens(labels: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
    """Return labels shifted by one; the last token of a document predicts nothing."""
    targets = torch.full_like(labels, IGNORED)
    within = documents[:, 1:] == documents[:, :-1]
    targets[:, :-1] = labels[:, 1:].where(within, IGNORED)
    return targets


def next_token_losses(
    hidden: torch.Tensor, head: Head, targets: torch.Tensor, chunk: int = CHUNK
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute cross entropy of labelled tokens, with a gradient, and whether it was predicted.

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
