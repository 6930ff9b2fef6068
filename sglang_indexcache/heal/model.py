"""A transformers DSA model with a pattern, ready to be trained.

Works on ``DeepseekV32ForCausalLM`` and ``GlmMoeDsaForCausalLM`` through the places that
transformers provides for it: a registered attention function and a prepared mask. Parameters keep
their names, so what is saved is a standard checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PreTrainedModel

from sglang_indexcache.checkpoint import Checkpoint
from sglang_indexcache.errors import TrainingError
from sglang_indexcache.heal.indexer import BorrowedSelection, LightningIndexer
from sglang_indexcache.heal.lm_loss import next_token_losses
from sglang_indexcache.heal.losses import (
    DEFAULT_BLOCK,
    AttentionInputs,
    IndexInputs,
    LossKernel,
)
from sglang_indexcache.heal.packing import IGNORED, Layout
from sglang_indexcache.heal.sharing import Sharing, Stage
from sglang_indexcache.models import TRAINABLE
from sglang_indexcache.pattern import Pattern

ATTENTION = "indexcache_training"
"""Name of the attention function, as transformers' ``attn_implementation``."""


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


class DistilledModel(nn.Module):
    """A DSA model whose S layers have no indexer and whose F layers' indexers are distilled.

    The indexers get distillation gradients only, everything else LM gradients only.

    Args:
        model: a freshly loaded transformers DSA model; its S layers' indexers are removed.
        pattern: one character per layer.
        cross_layer: L_multi if true; each indexer against its own layer only if false.
        block: queries per block of chunked work.
        kernel: of the sparse form of the loss.

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
        kernel: LossKernel = LossKernel.TORCH,
    ) -> None:
        super().__init__()
        check_trainable(model, pattern)
        self.model = model
        self.pattern = pattern
        self.sharing = Sharing(pattern, model.config.index_topk, cross_layer, block, kernel)
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
        """``[B, T, hidden_size]``: what the LM head reads; the arguments are :meth:`forward`'s."""
        self.sharing.start(stage, Layout(documents))
        # Never read: attention and indexers mask by the layout, block by block.
        no_mask = {"indexed_attention": documents.new_empty((1, 1, 1, 1))}
        with self._indexers_in_outputs():
            hidden: torch.Tensor = self.model.model(
                input_ids=ids, attention_mask=no_mask, position_ids=positions, use_cache=False
            ).last_hidden_state
        return hidden

    @contextmanager
    def _indexers_in_outputs(self) -> Iterator[None]:
        """Let every F layer also return what its indexer scores with.

        FSDP2 gathers a layer's weights again when a gradient reaches one of its outputs, which it
        looks for in a hook of its own on the layer's forward. The losses reach an indexer past the
        layers, and in the warm-up stage no hidden state has a gradient. So a hook before FSDP2's
        adds those tensors to the output, and one after it takes them away.
        """

        def add(layer: Any, _: Any, output: Any) -> tuple[Any, IndexInputs | None]:
            return output, self.sharing.running().index.get(layer.self_attn.layer_idx)

        def take_away(_: Any, __: Any, output: tuple[Any, IndexInputs | None]) -> Any:
            return output[0]

        with ExitStack() as hooks:
            for number in self.pattern.full_layers:
                layer = self.model.model.layers[number]
                hooks.callback(layer.register_forward_hook(add, prepend=True).remove)
                hooks.callback(layer.register_forward_hook(take_away).remove)
            yield

    def indexer_parameters(self) -> list[nn.Parameter]:
        """The parameters that distillation trains."""
        return [p for name, p in self.named_parameters() if is_indexer(name)]

    def body_parameters(self) -> list[nn.Parameter]:
        """The parameters that the LM loss trains."""
        return [p for _, p in self.named_body_parameters()]

    def named_body_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The same with their names."""
        return [(name, p) for name, p in self.named_parameters() if not is_indexer(name)]

    def prepare_stage(self, stage: Stage) -> None:
        """Freeze what ``stage`` does not train."""
        for parameter in self.indexer_parameters():
            parameter.requires_grad_(stage is not Stage.DENSE)
        for parameter in self.body_parameters():
            parameter.requires_grad_(stage is not Stage.WARMUP)


def is_indexer(name: str) -> bool:
    """Whether a parameter of this name belongs to an indexer."""
    return ".indexer." in name


def check_trainable(model: PreTrainedModel, pattern: Pattern) -> None:
    """Raise unless ``model`` can be trained with ``pattern``."""
    kind = model.config.model_type
    if kind not in TRAINABLE:
        raise TrainingError(
            f"a {kind} model cannot be trained; there are {' and '.join(TRAINABLE)}. Convert a "
            "dense MLA checkpoint first (indexcache train convert)."
        )
    config = {**model.config.to_dict(), "architectures": [TRAINABLE[kind].architecture]}
    pattern.check_checkpoint(Checkpoint.from_config(config).own)


def install(model: PreTrainedModel, pattern: Pattern, sharing: Sharing) -> None:
    """Put our indexers and our attention in their places."""
    interleaved = TRAINABLE[model.config.model_type].interleaved
    AttentionInterface.register(ATTENTION, _attention)
    model.set_attn_implementation(ATTENTION)
    model.config.indexer_types = pattern.to_indexer_types()
    for number, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        attention.sharing = sharing
        if pattern.is_full(number):
            attention.indexer = LightningIndexer(attention.indexer, interleaved, sharing)
        else:
            attention.indexer = BorrowedSelection(number, sharing)


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers' attention interface: our attention, and this layer's distillation term."""
    del attention_mask  # the layout says the same in O(L)
    sharing: Sharing = module.sharing
    layer = module.layer_idx
    layout = sharing.layout
    output = attend(query, key, value, scaling, layout, sharing.attended(layer), sharing.block)
    sharing.distil(layer, AttentionInputs(query.detach(), key.detach(), scaling))
    return output, None


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    layout: Layout,
    selected: torch.Tensor | None,
    block: int,
) -> torch.Tensor:
    """Attention that transformers' eager path gives with the same top-k mask.

    Args:
        queries: ``[B, N, T, d]``.
        keys: ``[B, N, T, d]``.
        values: ``[B, N, T, v]``.
        scale: multiplies the dot products.
        layout: who sees whom.
        selected: ``[B, T, k]`` top-k indices padded with -1; None attends to every visible key.
        block: queries per block.

    Returns:
        ``[B, T, N, v]``.
    """

    def attend_block(rows: slice) -> torch.Tensor:
        seen = slice(rows.stop)
        return scaled_dot_product_attention(
            queries[:, :, rows],
            keys[:, :, seen],
            values[:, :, seen],
            attn_mask=layout.attended(rows, selected).unsqueeze(1),
            scale=scale,
        )

    # The backward pass makes a block's mask again: those of all blocks would be O(L^2).
    outputs = [
        checkpoint(attend_block, rows, use_reentrant=False, preserve_rng_state=False)
        for rows in layout.blocks(block)
    ]
    return torch.cat(outputs[::-1], dim=2).transpose(1, 2)


def next_tokens(labels: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
    """Labels shifted by one; the last token of a document predicts nothing."""
    targets = torch.full_like(labels, IGNORED)
    same = documents[:, 1:] == documents[:, :-1]
    targets[:, :-1] = labels[:, 1:].where(same, IGNORED)
    return targets
