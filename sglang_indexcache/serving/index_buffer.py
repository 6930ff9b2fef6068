"""The indices in flight, which an F layer leaves for the S layers after it (paper, T_cache).

Each attention backend has one buffer, which holds the indices for one forward of one batch, so two
overlapping sub-batches have two buffers. If all rows have the same pattern, the buffer keeps a
reference to the F layer's tensor, whose address is fixed when a CUDA graph is captured. If rows
have different patterns, a layer that is F for some of them makes a new tensor; a tensor that was
given to a layer is never overwritten.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from sglang_indexcache.errors import StaleIndexError
from sglang_indexcache.kernels.contract import PADDING
from sglang_indexcache.serving.process import ServingProcess
from sglang_indexcache.serving.rows import RowPatterns


class IndexBuffer:
    """The one conditional branch of IndexCache (paper, figure "Side-by-side comparison", b).

    Layers are the model's layer numbers. The layer and the forward decide who writes and who reads,
    never the identity of a tensor: SGLang pads the rows of a batch for its collectives, and passes
    attention a slice without the padding.

    SGLang begins a captured forward once and then runs its layers three times, twice to warm up and
    once to record. So a layer can rely on writes by earlier layers in the same pass, but never on
    an empty buffer. Captured forwards have one pattern.

    Attributes:
        writes: a counter that rises with each write; while it is unchanged, layers share the same
            indices.

    Args:
        first_layer: the first layer of this pipeline stage. Indices that an earlier stage selected
            are passed in again in each pass.
    """

    def __init__(self, process: ServingProcess, first_layer: int = 0) -> None:
        self.writes = 0
        self._process = process
        self._first_layer = first_layer
        self._rows: RowPatterns | None = None
        self._sources: tuple[int | None, ...] = ()
        self._indices: torch.Tensor | None = None

    def begin(self, rows: RowPatterns | None = None) -> None:
        """Start a forward: forget the last one's indices, and fix its patterns."""
        self._rows = rows or RowPatterns((self._process.pattern,))
        self._sources = (None,) * len(self._rows.patterns)
        self._indices = None
        self.writes += 1

    @property
    def rows(self) -> RowPatterns:
        """Patterns of the current forward's rows; a switch of the default does not change them."""
        if self._rows is None:
            raise StaleIndexError("no forward has begun, so no pattern is in effect")
        return self._rows

    def is_full(self, layer: int) -> bool:
        """Return whether ``layer`` is F for some row, so that its indexer runs in this forward."""
        position = self._process.position(layer)
        return any(pattern.is_full(position) for pattern in self.rows.patterns)

    def select(self, layer: int, selected: torch.Tensor | None) -> torch.Tensor:
        """Store the selection ``[T, k]`` of ``layer``, which is F for some row.

        Returns:
            ``[T, k]``: ``selected`` in rows for which the layer is F; the earlier indices in all
            others.

        Raises:
            StaleIndexError: nothing was selected, or the layer is S for a row whose F layer has not
                written in this forward.
        """
        if selected is None:
            raise StaleIndexError(f"layer {layer} is F, but its indexer selected nothing")
        position, patterns = self._process.position(layer), self.rows.patterns
        if not all(pattern.is_full(position) for pattern in patterns):
            self._check(layer, but=position)
            selected = self._merged(position, selected)
        self._indices = selected
        self.writes += 1  # a capture's next pass may reuse the tensor
        self._sources = tuple(
            position if pattern.is_full(position) else source
            for pattern, source in zip(patterns, self._sources, strict=True)
        )
        return selected

    def _merged(self, position: int, selected: torch.Tensor) -> torch.Tensor:
        """Merge ``selected``, for rows that are F at ``position``, into the other rows' indices."""
        masks, indices, count = self.rows.masks, self._indices, selected.shape[0]
        assert masks is not None, "several patterns"
        assert indices is not None, "the rows that are not F here have some"
        if min(masks.shape[1], indices.shape[0]) < count:
            raise StaleIndexError(
                f"position {position} selected for {count} rows, of a forward that had "
                f"{min(masks.shape[1], indices.shape[0])} before"
            )
        return torch.where(masks[position, :count, None], selected, indices[:count])

    def read(self, layer: int, rows: int) -> torch.Tensor:
        """Return :meth:`shared` without the rows that pad the forward: ``[rows, k]`` or fewer."""
        indices = self.shared(layer)
        return indices if indices.shape[0] <= rows else indices[:rows]

    def shared(self, layer: int) -> torch.Tensor:
        """Return the indices ``[T, k]`` that ``layer`` uses, in all rows of the forward.

        Raises:
            StaleIndexError: some row lacks its own F layer's indices, which must have been written,
                adopted or inherited in this forward.
        """
        self._check(layer)
        assert self._indices is not None, "some layer wrote them"
        return self._indices

    def adopt(self, layer: int, carried: torch.Tensor | None) -> None:
        """Take over the indices of an earlier pipeline stage, if ``layer`` shares them.

        SGLang passes them to attention as ``[T, k]``; it carries only one pattern between stages.
        """
        if carried is not None and self._shares_from_before(layer, self._first_layer):
            self._sources, self._indices = self._sources_of(layer), carried
            self.writes += 1

    def inherit(
        self, layer: int, whole: IndexBuffer, rows: tuple[int, int], count: int, before: int
    ) -> None:
        """Take over the whole batch's indices in this part of it, if ``layer`` needs them.

        Args:
            rows: range of this part's rows in the whole batch, without its end.
            count: number of this part's rows, padding included.
            before: the first layer that runs on parts.
        """
        # Later passes of a captured forward find the buffer full, and must inherit again.
        is_due = self._indices is None or len(self.rows.patterns) == 1
        if is_due and whole._indices is not None and self._shares_from_before(layer, before):
            part = whole._indices[slice(*rows)]
            if part.shape[0] < count:
                part = pad(part, (0, 0, 0, count - part.shape[0]), value=PADDING)
            self._sources, self._indices = whole._sources, part
            self.writes += 1

    def _check(self, layer: int, but: int | None = None) -> None:
        """Raise StaleIndexError unless each pattern's rows hold the indices of their F layer.

        ``but`` is the position that is about to write, which may be missing.
        """
        for expected, source in zip(self._sources_of(layer), self._sources, strict=True):
            if expected not in (source, but):
                content = "nothing" if source is None else f"those of position {source}"
                raise StaleIndexError(
                    f"layer {layer} shares the indices of pattern position {expected}, but the "
                    f"buffer holds {content}"
                )

    def _sources_of(self, layer: int) -> tuple[int, ...]:
        """Return, for each pattern, the position whose indices ``layer`` uses."""
        position = self._process.position(layer)
        return tuple(pattern.source_of(position) for pattern in self.rows.patterns)

    def _shares_from_before(self, layer: int, limit: int) -> bool:
        """Return whether ``layer`` uses, in some row, the indices of a layer below ``limit``."""
        layers = self._process.plan.layer_ids
        return any(layers[source] < limit for source in self._sources_of(layer))
