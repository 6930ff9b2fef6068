"""Two points of a layer in each backend, at which others than the method have a say.

A backend's own code reads and writes the index buffer. Whoever counts or compares lists
is an observer: it is called when a layer's indexer has run, and when attention is about to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from sglang_indexcache.serving.active import ActivePattern
    from sglang_indexcache.serving.index_buffer import IndexBuffer


class Observer:
    """A listener at both points, which does nothing at either.

    ``layer`` is the model's layer number, ``batch`` SGLang's forward batch.
    """

    def selected(self, layer: int, batch: Any, lists: Tensor | None, **evidence: Any) -> None:
        """Follow a list that the indexer of ``layer`` made, or could make, in this forward.

        Args:
            lists: ``[T, k]``: what the layer is given by sharing; in static mode, where its own
                list is in ``evidence``, what it would be given.
            evidence: as :meth:`Shadow.look` takes it, to know the layer's own list.
        """

    def served(self, layer: int) -> None:
        """Follow ``layer``, which is about to attend to what the buffer holds."""


class Observed:
    """A backend with observers, which are called in this order.

    Attributes:
        observers: those of this backend; it sets them when it is made.
    """

    observers: tuple[Observer, ...] = ()

    def selected(self, layer: int, batch: Any, lists: Tensor | None, **evidence: Any) -> None:
        """Tell the observers that the indexer of ``layer`` made a list, or could make one."""
        for observer in self.observers:
            observer.selected(layer, batch, lists, **evidence)

    def served(self, layer: int) -> None:
        """Tell the observers that ``layer`` is about to attend to what the buffer holds."""
        for observer in self.observers:
            observer.served(layer)


class Counting(Observer):
    """The counters of layers that used a selection of their own, or another layer's."""

    def __init__(self, active: ActivePattern, index_buffer: IndexBuffer) -> None:
        self._active, self._index_buffer = active, index_buffer

    def served(self, layer: int) -> None:
        """Count the layer."""
        if self._index_buffer.is_full(layer):
            self._active.count_selection(layer)
        else:
            self._active.count_reuse(layer)
