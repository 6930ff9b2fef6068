"""State that one forward pass carries from layer to layer: the F layer's selection and its q.

A model that is trained as a whole uses :class:`Sharing`, whose losses are backpropagated together.
A frozen model uses :class:`LocalSharing`: no gradient flows through its layers, so a layer's loss
depends on no other layer except through the indexer that serves it, and is backpropagated at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import torch

from sglang_indexcache.errors import StaleIndexError
from sglang_indexcache.lab.heal.losses import (
    DEFAULT_BLOCK,
    AttentionInputs,
    IndexInputs,
    captured_mass,
    distillation_loss,
    select_top_k,
)
from sglang_indexcache.lab.heal.packing import Layout
from sglang_indexcache.pattern import Pattern


class Stage(StrEnum):
    """Stage of training.

    ``DENSE`` trains the model with full attention, without the indexers. ``WARMUP`` trains only the
    indexers, against full attention. ``SPARSE`` trains everything, with attention over the selected
    keys (paper section "Training-Aware IndexCache", Training).
    """

    DENSE = "dense"
    WARMUP = "warmup"
    SPARSE = "sparse"


@dataclass
class ForwardState:
    """The state of one forward pass; dropped after its backward pass.

    Attributes:
        queries: number of queries by which a frozen model's losses are divided.
        projected: an indexer's outputs, until the gradient is backpropagated through them.
        chosen: when measuring, the indexer's selection, also in the dense stage.
        captured: when measuring, the attention mass of each layer's selection, summed over queries,
            and the number of those queries.
    """

    stage: Stage
    layout: Layout
    queries: float = 1.0
    index: dict[int, IndexInputs] = field(default_factory=dict)
    selected: dict[int, torch.Tensor] = field(default_factory=dict)
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    projected: dict[int, IndexInputs] = field(default_factory=dict)
    chosen: dict[int, torch.Tensor] = field(default_factory=dict)
    captured: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


class Sharing:
    """Connection between a model's indexers and attention layers.

    Args:
        block: number of queries per block of chunked work.
    """

    def __init__(self, pattern: Pattern, topk: int, block: int = DEFAULT_BLOCK) -> None:
        self.pattern, self.topk, self.block = pattern, topk, block
        self.forward: ForwardState | None = None

    def start(self, stage: Stage, layout: Layout) -> ForwardState:
        """Begin a forward pass."""
        self.forward = state = ForwardState(stage, layout)
        return state

    @property
    def layout(self) -> Layout:
        """Visibility of keys in the current forward pass."""
        return self.running().layout

    @property
    def needs_index(self) -> bool:
        """Whether the current forward pass selects or distils."""
        return self.running().stage is not Stage.DENSE

    def no_selection(self) -> torch.Tensor:
        """Return ``[B, T, 0]`` int32, the selection to pass on when nothing is selected."""
        documents = self.layout.documents
        return documents.new_empty((*documents.shape, 0), dtype=torch.int32)

    def select(self, layer: int, index: IndexInputs) -> torch.Tensor:
        """Store an F layer's index inputs and return its selection, empty unless sparse."""
        run, selection = self.running(), self.no_selection()
        if run.stage is Stage.SPARSE:
            selection = select_top_k(index, run.layout, self.topk, self.block)
        run.index[layer], run.selected[layer] = index, selection
        return selection

    def selection(self, layer: int) -> torch.Tensor:
        """Return the selection of the F layer that serves ``layer``; empty in the dense stage."""
        if not self.needs_index:
            return self.no_selection()
        source = self.pattern.source_of(layer)
        selected = self.running().selected
        if source not in selected:
            raise StaleIndexError(
                f"layer {layer} asked for the indices of layer {source} too early"
            )
        return selected[source]

    def attended(self, layer: int) -> torch.Tensor | None:
        """Return the keys that ``layer`` attends to; None stands for all visible keys."""
        if self.running().stage is not Stage.SPARSE:
            return None
        return self.selection(layer)

    def distil(self, layer: int, attention: AttentionInputs) -> None:
        """Add the term of one served layer: KL(p^(layer) || q^(source)), weighted by 1/(m+1)."""
        run = self.running()
        source = self.pattern.source_of(layer)
        if run.stage is Stage.DENSE:
            return
        attended = self.attended(layer)
        loss = distillation_loss(run.index[source], [attention], run.layout, attended, self.block)
        run.losses[layer] = loss / self.pattern.sources.count(source)

    def running(self) -> ForwardState:
        """Return the forward pass that started last.

        Raises:
            StaleIndexError: no forward pass has started.
        """
        if self.forward is None:
            raise StaleIndexError("a layer ran outside a forward pass of DistilledModel")
        return self.forward


class LocalSharing(Sharing):
    """Connection between the indexers and attention layers of a frozen model.

    Several forward passes may be in progress; whoever runs a layer first sets ``forward`` to the
    one that it is for. With gradients enabled it trains: each loss's gradient is added to that of
    the indexer's score inputs, and after the last layer that the indexer serves, the sum is
    backpropagated through the indexer, and everything is dropped. Without gradients it measures,
    including the attention mass that each selection captures.
    """

    def select(self, layer: int, index: IndexInputs) -> torch.Tensor:
        """Select like :meth:`Sharing.select`, and give the losses copies that collect gradients."""
        run = self.running()
        if torch.is_grad_enabled():
            run.projected[layer] = index
            parts = (index.queries, index.keys, index.weights)
            index = IndexInputs(*(part.detach().requires_grad_() for part in parts))
        selected = super().select(layer, index)
        if not torch.is_grad_enabled():
            sparse = run.stage is Stage.SPARSE
            run.chosen[layer] = (
                selected if sparse else select_top_k(index, run.layout, self.topk, self.block)
            )
        return selected

    def distil(self, layer: int, attention: AttentionInputs) -> None:
        """Distil like :meth:`Sharing.distil`, and use the gradient at once."""
        super().distil(layer, attention)
        run, source = self.running(), self.pattern.source_of(layer)
        if torch.is_grad_enabled():
            (run.losses[layer] / run.queries).backward()  # type: ignore[no-untyped-call]
            run.losses[layer] = run.losses[layer].detach()
        else:
            chosen = run.chosen[source]
            run.captured[layer] = captured_mass(attention, run.layout, chosen, self.block)
        if layer + 1 == len(self.pattern) or self.pattern.is_full(layer + 1):
            self._end(run, source)

    def _end(self, run: ForwardState, source: int) -> None:
        """End the group of ``source`` after the last layer that it serves."""
        scored = run.index.pop(source)
        projected = run.projected.pop(source, None)
        if projected is not None:
            outputs = [projected.queries, projected.keys, projected.weights]
            grads = [part.grad for part in (scored.queries, scored.keys, scored.weights)]
            torch.autograd.backward(outputs, grads)
        run.selected.pop(source)
        run.chosen.pop(source, None)
