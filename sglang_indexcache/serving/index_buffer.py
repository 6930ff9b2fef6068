"""The indices in flight: what an F layer leaves for the S layers behind it (paper, T_cache).

One buffer lives in each attention backend and holds the indices of one forward of one batch, so
two sub-batches that overlap have two buffers. It keeps a reference to the F layer's tensor and
never copies it: under CUDA graphs the tensor's address is fixed when the graph is captured.
"""

from __future__ import annotations

import torch

from sglang_indexcache.errors import StaleIndexError
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.active import ActivePattern


class IndexBuffer:
    """The one conditional branch of IndexCache (paper, figure "Side-by-side comparison", b).

    Layers are the model's layer numbers. Every forward begins with :meth:`begin`; then each
    attention layer asks :meth:`resolve` which indices to attend to.

    SGLang begins a captured forward once and then runs its layers three times, twice to warm up
    and once to record. So the layers of a pass can rely on what the same pass wrote before them,
    but never on an empty buffer.

    Args:
        active: the pattern that the next forward obeys.
        first_layer: the first layer of this pipeline stage. What an earlier one selected is handed
            in anew in each pass.
    """

    def __init__(self, active: ActivePattern, first_layer: int = 0) -> None:
        self._active = active
        self._first_layer = first_layer
        self._pattern: Pattern | None = None
        self._source: int | None = None
        self._indices: torch.Tensor | None = None

    def begin(self) -> None:
        """Start a forward: forget the last one's indices, obey the active pattern to the end."""
        self._pattern = self._active.pattern
        self._source = None
        self._indices = None

    @property
    def pattern(self) -> Pattern:
        """The pattern of the forward in progress; a switch meanwhile does not change it."""
        if self._pattern is None:
            raise StaleIndexError("no forward has begun, so no pattern is in effect")
        return self._pattern

    def is_full(self, layer: int) -> bool:
        """Whether ``layer`` runs its indexer in this forward."""
        return self.pattern.is_full(self._active.position(layer))

    def resolve(self, layer: int, selected: torch.Tensor | None) -> torch.Tensor:
        """The indices that ``layer`` attends to.

        Args:
            layer: the model's layer number.
            selected: for an F layer what its indexer selected. For an S layer what the engine
                carried to it, what its own indexer handed on in live mode, or None.

        Raises:
            StaleIndexError: an F layer without indices, or an S layer whose F layer has not
                written in this forward.
        """
        if self.is_full(layer):
            if selected is None:
                raise StaleIndexError(f"layer {layer} is F, but its indexer selected nothing")
            self._source, self._indices = self._active.position(layer), selected
            return selected
        if selected is not None and self.source_layer(layer) < self._first_layer:
            self.adopt(layer, selected)
        return self.shared(layer)

    def shared(self, layer: int) -> torch.Tensor:
        """The indices that S layer ``layer`` shares.

        Raises:
            StaleIndexError: unless exactly its F layer's were written or adopted in this forward.
        """
        expected = self._position_of_source(layer)
        if self._indices is None or self._source != expected:
            held = "nothing" if self._source is None else f"those of position {self._source}"
            raise StaleIndexError(
                f"layer {layer} shares the indices of pattern position {expected}, but the buffer "
                f"holds {held}"
            )
        return self._indices

    def source_layer(self, layer: int) -> int:
        """The layer whose indices ``layer`` uses."""
        return self._active.plan.layer_ids[self._position_of_source(layer)]

    def adopt(self, layer: int, indices: torch.Tensor) -> None:
        """Take over what ``layer``'s F layer selected elsewhere.

        Elsewhere is an earlier pipeline stage, or the whole batch of which this is a part.
        """
        self._source, self._indices = self._position_of_source(layer), indices

    def _position_of_source(self, layer: int) -> int:
        """The place in the pattern of the layer whose indices ``layer`` uses."""
        return self.pattern.source_of(self._active.position(layer))
