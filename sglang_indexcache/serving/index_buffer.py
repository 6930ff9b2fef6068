"""The indices in flight: what an F layer leaves for the S layers behind it (paper, T_cache).

One buffer lives in each attention backend and holds the indices of one forward of one batch, so
two sub-batches that overlap have two buffers. Where all rows obey one pattern it keeps a reference
to the F layer's tensor: under CUDA graphs its address is fixed at the capture. Where rows obey
several, a layer that is F for some makes a new tensor; what a layer was given is never written to.
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

    Layers are the model's layer numbers. Who writes and who reads is decided by the layer and the
    forward, never by which tensor somebody holds: SGLang pads the rows of a batch for its
    collectives, and hands attention a slice without the padding.

    SGLang begins a captured forward once and then runs its layers three times, twice to warm up
    and once to record. So the layers of a pass can rely on what the same pass wrote before them,
    but never on an empty buffer. Captured forwards have one pattern.

    Attributes:
        writes: rises whenever indices come in; while it stands, layers share the same ones.

    Args:
        first_layer: of this pipeline stage. What an earlier one selected is handed in anew in each
            pass.
    """

    def __init__(self, process: ServingProcess, first_layer: int = 0) -> None:
        self.writes = 0
        self._process = process
        self._first_layer = first_layer
        self._rows: RowPatterns | None = None
        self._sources: tuple[int | None, ...] = ()
        self._indices: torch.Tensor | None = None

    def begin(self, rows: RowPatterns | None = None) -> None:
        """Start a forward: forget the last one's indices, obey the same patterns to the end."""
        self._rows = rows or RowPatterns((self._process.pattern,))
        self._sources = (None,) * len(self._rows.patterns)
        self._indices = None
        self.writes += 1

    @property
    def rows(self) -> RowPatterns:
        """Patterns of the rows of the forward in progress; a switch does not change them."""
        if self._rows is None:
            raise StaleIndexError("no forward has begun, so no pattern is in effect")
        return self._rows

    def is_full(self, layer: int) -> bool:
        """Return whether ``layer`` runs its indexer in this forward: it is F for some row."""
        position = self._process.position(layer)
        return any(pattern.is_full(position) for pattern in self.rows.patterns)

    def select(self, layer: int, selected: torch.Tensor | None) -> torch.Tensor:
        """Take what the indexer of ``layer``, which is F for some row, selected: ``[T, k]``.

        Returns:
            ``[T, k]``: ``selected`` in the rows for which the layer is F, in the others what they
            had before.

        Raises:
            StaleIndexError: nothing was selected, or a row for which the layer is S and whose F
                layer has not written in this forward.
        """
        if selected is None:
            raise StaleIndexError(f"layer {layer} is F, but its indexer selected nothing")
        position, patterns = self._process.position(layer), self.rows.patterns
        if not all(pattern.is_full(position) for pattern in patterns):
            self._check(layer, but=position)
            selected = self._merged(position, selected)
        self._indices = selected
        self.writes += 1  # the next pass of a capture may select into the same tensor
        self._sources = tuple(
            position if pattern.is_full(position) else source
            for pattern, source in zip(patterns, self._sources, strict=True)
        )
        return selected

    def _merged(self, position: int, selected: torch.Tensor) -> torch.Tensor:
        """Merge ``selected``, for the rows that are F at ``position``, into what the others had."""
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
        """Return ``[T, k]``: what ``layer`` uses, in all rows of the forward.

        Raises:
            StaleIndexError: some row lacks its own F layer's indices, written, adopted or
                inherited in this very forward.
        """
        self._check(layer)
        assert self._indices is not None, "some layer wrote them"
        return self._indices

    def adopt(self, layer: int, carried: torch.Tensor | None) -> None:
        """Take over what an earlier pipeline stage selected, if that is what ``layer`` shares.

        SGLang hands it to attention, ``[T, k]``, between stages for one pattern only.
        """
        if carried is not None and self._shares_from_before(layer, self._first_layer):
            self._sources, self._indices = self._sources_of(layer), carried
            self.writes += 1

    def inherit(
        self, layer: int, whole: IndexBuffer, rows: tuple[int, int], count: int, before: int
    ) -> None:
        """Take over what the whole batch selected of which this is a part, if ``layer`` needs it.

        Args:
            rows: this part's in the whole batch, from and to below.
            count: of this part's rows, those that pad it too.
            before: the first layer that runs on parts.
        """
        # Later passes of a captured forward find the buffer full; they inherit anew.
        is_due = self._indices is None or len(self.rows.patterns) == 1
        if is_due and whole._indices is not None and self._shares_from_before(layer, before):
            part = whole._indices[slice(*rows)]
            if part.shape[0] < count:
                part = pad(part, (0, 0, 0, count - part.shape[0]), value=PADDING)
            self._sources, self._indices = whole._sources, part
            self.writes += 1

    def _check(self, layer: int, but: int | None = None) -> None:
        """Raise StaleIndexError unless each pattern's rows hold the indices of their F layer.

        ``but`` is the position that is about to write.
        """
        for expected, source in zip(self._sources_of(layer), self._sources, strict=True):
            if expected not in (source, but):
                content = "nothing" if source is None else f"those of position {source}"
                raise StaleIndexError(
                    f"layer {layer} shares the indices of pattern position {expected}, but the "
                    f"buffer holds {content}"
                )

    def _sources_of(self, layer: int) -> tuple[int, ...]:
        """Return for each pattern the position whose indices ``layer`` uses."""
        position = self._process.position(layer)
        return tuple(pattern.source_of(position) for pattern in self.rows.patterns)

    def _shares_from_before(self, layer: int, limit: int) -> bool:
        """Return whether ``layer`` takes some row's indices from a layer below ``limit``."""
        layers = self._process.plan.layer_ids
        return any(layers[source] < limit for source in self._sources_of(layer))
