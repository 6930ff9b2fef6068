"""The distillation losses of a frozen model: each layer's is taken back where it arises.

Nothing flows through the body, so a layer's loss needs nothing of other layers but the indexer
that serves it. Its gradient is added to what that indexer scored with; after the last layer that
the indexer serves, the sum goes back through the indexer, and everything is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from sglang_indexcache.heal.losses import (
    AttentionInputs,
    IndexInputs,
    captured_mass,
    select_top_k,
)
from sglang_indexcache.heal.packing import Layout
from sglang_indexcache.heal.sharing import ForwardState, Sharing, Stage


@dataclass
class LocalForward(ForwardState):
    """The state of one forward pass of some rows; several may be under way.

    Attributes:
        queries: what losses are divided by before they are taken back.
        projected: what an indexer computed, until the gradient goes back through it.
        chosen: what an indexer would select, also where nothing is selected; when measuring.
        captured: of each layer the attention mass that its selection has, and how many queries
            that is a sum over; when measuring.
    """

    queries: float = 1.0
    projected: dict[int, IndexInputs] = field(default_factory=dict)
    chosen: dict[int, torch.Tensor] = field(default_factory=dict)
    captured: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def move(self, device: torch.device) -> None:
        """Go on with layers on another device, with what the F layer before them hands down.

        The gradients that were added up so far go along, so that their order stays the same.
        """
        if self.layout.documents.device == device:
            return
        self.layout = Layout(self.layout.documents.to(device))
        for held in (self.selected, self.chosen):
            held.update({layer: selected.to(device) for layer, selected in held.items()})
        for layer, index in self.index.items():
            parts = (index.queries, index.keys, index.weights)
            self.index[layer] = IndexInputs(*(_moved(part, device) for part in parts))


class LocalSharing(Sharing):
    """Connects the indexers and attentions of a frozen model.

    With gradients enabled it trains: losses are taken back at once. Without, it measures: the
    attention mass that each selection captures as well.
    """

    def begin(self, stage: Stage, layout: Layout, queries: float) -> LocalForward:
        """A forward pass to :meth:`resume`; losses are divided by ``queries`` when taken back."""
        return LocalForward(stage, layout, queries=queries)

    def resume(self, run: LocalForward) -> None:
        """The next layer is one of this forward pass."""
        self.forward = run

    def select(self, layer: int, index: IndexInputs) -> torch.Tensor:
        """As :meth:`Sharing.select`; the losses see copies that collect their gradients."""
        run = self._local()
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
        """As :meth:`Sharing.distil`, and at once what its gradient is for."""
        super().distil(layer, attention)
        run, source = self._local(), self.pattern.source_of(layer)
        if torch.is_grad_enabled():
            (run.losses[layer] / run.queries).backward()  # type: ignore[no-untyped-call]
            run.losses[layer] = run.losses[layer].detach()
        else:
            chosen = self.with_window(layer, run.chosen[source])
            run.captured[layer] = captured_mass(attention, run.layout, chosen, self.block)
        if layer + 1 == len(self.pattern) or self.pattern.is_full(layer + 1):
            self._end(run, source)

    def _end(self, run: LocalForward, source: int) -> None:
        """The last layer that ``source`` serves is done."""
        scored = run.index.pop(source)
        projected = run.projected.pop(source, None)
        if projected is not None:
            outputs = [projected.queries, projected.keys, projected.weights]
            grads = [part.grad for part in (scored.queries, scored.keys, scored.weights)]
            there = projected.keys.device
            torch.autograd.backward(outputs, [None if g is None else g.to(there) for g in grads])
        run.selected.pop(source)
        run.chosen.pop(source, None)

    def _local(self) -> LocalForward:
        run = self.running()
        if not isinstance(run, LocalForward):
            raise TypeError("begin and resume a forward pass before a layer runs")
        return run


def _moved(part: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A leaf on ``device`` with the same gradient."""
    moved = part.detach().to(device).requires_grad_(part.requires_grad)
    if part.grad is not None:
        moved.grad = part.grad.to(device)
    return moved
