"""Rows pass through a frozen model, and each layer's loss is taken back where it arises.

Nothing flows through the body, so a layer's loss needs nothing of other layers but the indexer
that serves it. Its gradient is added to what that indexer scored with; after the last layer that
the indexer serves, the sum goes back through the indexer, and everything is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from sglang_indexcache.lab.heal.forward_state import ForwardState, Sharing, Stage
from sglang_indexcache.lab.heal.frozen import FrozenBody
from sglang_indexcache.lab.heal.losses import (
    AttentionInputs,
    IndexInputs,
    captured_mass,
    select_top_k,
)
from sglang_indexcache.lab.heal.model import Rotation
from sglang_indexcache.lab.heal.packing import Layout


@dataclass
class LocalForward(ForwardState):
    """The state of one forward pass of some rows; several may be under way.

    Attributes:
        queries: what losses are divided by before they are taken back.
        projected: what an indexer computed, until the gradient goes back through it.
        chosen: what an indexer would select, also where nothing is selected; when measuring.
        captured: when measuring, the attention mass of each layer's selection, summed over queries,
            and the number of those queries.
    """

    queries: float = 1.0
    projected: dict[int, IndexInputs] = field(default_factory=dict)
    chosen: dict[int, torch.Tensor] = field(default_factory=dict)
    captured: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


class LocalSharing(Sharing):
    """Connects the indexers and attentions of a frozen model.

    With gradients enabled it trains: losses are taken back at once. Without, it measures: the
    attention mass that each selection captures as well.
    """

    def begin(self, stage: Stage, layout: Layout, queries: float) -> LocalForward:
        """Begin a forward pass to :meth:`resume`; losses are divided by ``queries`` when taken."""
        return LocalForward(stage, layout, queries=queries)

    def resume(self, run: LocalForward) -> None:
        """Make this forward pass the one that the next layer belongs to."""
        self.forward = run

    def select(self, layer: int, index: IndexInputs) -> torch.Tensor:
        """Select as :meth:`Sharing.select`; the losses see copies that collect their gradients."""
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
        """Distil as :meth:`Sharing.distil`, and use the gradient at once."""
        super().distil(layer, attention)
        run, source = self._local(), self.pattern.source_of(layer)
        if torch.is_grad_enabled():
            (run.losses[layer] / run.queries).backward()  # type: ignore[no-untyped-call]
            run.losses[layer] = run.losses[layer].detach()
        else:
            chosen = run.chosen[source]
            run.captured[layer] = captured_mass(attention, run.layout, chosen, self.block)
        if layer + 1 == len(self.pattern) or self.pattern.is_full(layer + 1):
            self._end(run, source)

    def _end(self, run: LocalForward, source: int) -> None:
        """End the group of ``source``: the last layer that it serves is done."""
        scored = run.index.pop(source)
        projected = run.projected.pop(source, None)
        if projected is not None:
            outputs = [projected.queries, projected.keys, projected.weights]
            grads = [part.grad for part in (scored.queries, scored.keys, scored.weights)]
            torch.autograd.backward(outputs, grads)
        run.selected.pop(source)
        run.chosen.pop(source, None)

    def _local(self) -> LocalForward:
        run = self.running()
        if not isinstance(run, LocalForward):
            raise TypeError("begin and resume a forward pass before a layer runs")
        return run


@dataclass
class Passing:
    """Some rows, and how far they have come: ``[B, T, hidden_size]``, what the next layer reads."""

    run: LocalForward
    hidden: torch.Tensor
    rotation: Rotation

    def through(
        self,
        layer: Callable[[torch.Tensor, Rotation], torch.Tensor],
        device: torch.device,
        sharing: LocalSharing,
    ) -> None:
        """Run a layer that lies on ``device``.

        The layers that an indexer serves lie on one, so nothing of theirs is under way here.
        """
        self.run.layout = Layout(self.run.layout.documents.to(device))
        cosine, sine = self.rotation
        self.rotation = cosine.to(device), sine.to(device)
        sharing.resume(self.run)
        self.hidden = layer(self.hidden.to(device), self.rotation)


def pass_through(body: FrozenBody, sharing: LocalSharing, rows: Sequence[Passing]) -> None:
    """Run all layers on all rows, with gradients if enabled.

    A layer takes all rows before the next one does, so it is dequantised or read once.
    """
    for number, device in enumerate(body.devices):
        layer = body.layer(number)
        for row in rows:
            row.through(layer, device, sharing)
