"""Forward passes of rows through a frozen model, with each loss backpropagated within its layer.

No gradient flows through the body, so a layer's loss depends on no other layer except through the
indexer that serves it. Its gradient is added to that of the indexer's score inputs. After the last
layer that the indexer serves, the sum is backpropagated through the indexer, and everything is
dropped.
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
    """State of one forward pass of some rows; several may be in progress.

    Attributes:
        queries: number of queries by which losses are divided.
        projected: an indexer's outputs, until the gradient is backpropagated through them.
        chosen: when measuring, the indexer's selection, also in the dense stage.
        captured: when measuring, the attention mass of each layer's selection, summed over queries,
            and the number of those queries.
    """

    queries: float = 1.0
    projected: dict[int, IndexInputs] = field(default_factory=dict)
    chosen: dict[int, torch.Tensor] = field(default_factory=dict)
    captured: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


class LocalSharing(Sharing):
    """Connection between the indexers and attention layers of a frozen model.

    With gradients enabled it trains, and backpropagates losses at once. Without them it measures,
    including the attention mass that each selection captures.
    """

    def begin(self, stage: Stage, layout: Layout, queries: float) -> LocalForward:
        """Begin a forward pass to :meth:`resume`; its losses are divided by ``queries``."""
        return LocalForward(stage, layout, queries=queries)

    def resume(self, run: LocalForward) -> None:
        """Make this forward pass the current one for the next layer."""
        self.forward = run

    def select(self, layer: int, index: IndexInputs) -> torch.Tensor:
        """Select like :meth:`Sharing.select`, and give the losses copies that collect gradients."""
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
        """Distil like :meth:`Sharing.distil`, and use the gradient at once."""
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
        """End the group of ``source`` after the last layer that it serves."""
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
    """Rows on their way through the layers, with the next layer's input ``[B, T, hidden_size]``."""

    run: LocalForward
    hidden: torch.Tensor
    rotation: Rotation

    def through(
        self,
        layer: Callable[[torch.Tensor, Rotation], torch.Tensor],
        device: torch.device,
        sharing: LocalSharing,
    ) -> None:
        """Run a layer that is on ``device``.

        All layers that an indexer serves are on one device, so no state of a group moves here.
        """
        self.run.layout = self.run.layout.to(device)
        cosine, sine = self.rotation
        self.rotation = cosine.to(device), sine.to(device)
        sharing.resume(self.run)
        self.hidden = layer(self.hidden.to(device), self.rotation)


def pass_through(body: FrozenBody, sharing: LocalSharing, rows: Sequence[Passing]) -> None:
    """Run all layers on all rows, with gradients if they are enabled.

    A layer processes all rows before the next one starts, so it is dequantised or read once.
    """
    for number, device in enumerate(body.devices):
        layer = body.layer(number)
        for row in rows:
            row.through(layer, device, sharing)
