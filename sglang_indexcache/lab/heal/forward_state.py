"""State that one forward pass carries from layer to layer: the F layer's selection and its q."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import torch

from sglang_indexcache.errors import StaleIndexError
from sglang_indexcache.lab.heal.losses import (
    DEFAULT_BLOCK,
    AttentionInputs,
    IndexInputs,
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
    """The state of one forward pass; dropped after its backward pass."""

    stage: Stage
    layout: Layout
    index: dict[int, IndexInputs] = field(default_factory=dict)
    selected: dict[int, torch.Tensor] = field(default_factory=dict)
    losses: dict[int, torch.Tensor] = field(default_factory=dict)


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
