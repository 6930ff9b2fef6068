"""The indices in flight: what an F layer leaves for the S layers behind it (paper, T_cache).

One buffer lives in each attention backend and holds the indices of one forward of one batch, so
two sub-batches that overlap have two buffers. Where all rows obey one pattern it keeps a reference
to the F layer's tensor and never copies it: under CUDA graphs the tensor's address is fixed when
the graph is captured. Where rows obey several, a layer that is F for some makes a new tensor of
what those selected and what the others keep; what a layer was given is never written to.
"""

from __future__ import annotations

import torch

from sglang_indexcache.errors import StaleIndexError
from sglang_indexcache.serving.active import ActivePattern
from sglang_indexcache.serving.rows import RowPatterns


class IndexBuffer:
    """The one conditional branch of IndexCache (paper, figure "Side-by-side comparison", b).

    Layers are the model's layer numbers. Every forward begins with :meth:`begin`; then each
    attention layer asks :meth:`resolve` which indices to attend to. Which rows a forward has, and
    which pattern each obeys, is known from its begin to its end.

    SGLang begins a captured forward once and then runs its layers three times, twice to warm up
    and once to record. So the layers of a pass can rely on what the same pass wrote before them,
    but never on an empty buffer. Captured forwards have one pattern.

    Attributes:
        writes: rises whenever indices come in; while it stands, layers share the same ones.

    Args:
        active: the model's layers, and the pattern where a forward does not say.
        first_layer: the first layer of this pipeline stage. What an earlier one selected is handed
            in anew in each pass.
    """

    def __init__(self, active: ActivePattern, first_layer: int = 0) -> None:
        self.writes = 0
        self._active = active
        self._first_layer = first_layer
        self._rows: RowPatterns | None = None
        self._sources: tuple[int | None, ...] = ()
        self._written: int | None = None
        self._indices: torch.Tensor | None = None

    def begin(self, rows: RowPatterns | None = None) -> None:
        """Start a forward: forget the last one's indices, obey the same patterns to the end.

        Args:
            rows: which pattern each row obeys. By default the active one, all of them.
        """
        self._rows = rows or RowPatterns.one(self._active.pattern)
        self._sources = (None,) * len(self._rows.patterns)
        self._written = None
        self._indices = None
        self.writes += 1

    @property
    def rows(self) -> RowPatterns:
        """Of the forward in progress; a switch meanwhile does not change them."""
        if self._rows is None:
            raise StaleIndexError("no forward has begun, so no pattern is in effect")
        return self._rows

    def is_full(self, layer: int) -> bool:
        """Whether ``layer`` runs its indexer in this forward: it is F for some row."""
        position = self._active.position(layer)
        return any(pattern.is_full(position) for pattern in self.rows.patterns)

    def resolve(self, layer: int, selected: torch.Tensor | None) -> torch.Tensor:
        """The indices that ``layer`` attends to.

        In live mode an indexer asks first and attention again, with what the indexer was told:
        the second time nothing is done.

        Args:
            layer: the model's layer number.
            selected: ``[T, k]``. Where the layer is F for some row, what its indexer selected. For
                an S layer what the engine carried to it, what its own indexer handed on in live
                mode, or None.

        Returns:
            ``[T, k]``: ``selected`` in the rows for which the layer is F, in the others what they
            had before.

        Raises:
            StaleIndexError: an F layer without indices, or a row for which the layer is S and
                whose F layer has not written in this forward.
        """
        if self.is_full(layer):
            if selected is None:
                raise StaleIndexError(f"layer {layer} is F, but its indexer selected nothing")
            self._take(layer, selected)
        elif selected is not None and self._comes_from_earlier_stage(layer):
            self.adopt(layer, selected)
        return self.shared(layer)

    def shared(self, layer: int) -> torch.Tensor:
        """The indices that ``layer`` shares with the layers before it.

        Raises:
            StaleIndexError: unless for every row exactly its F layer's were written, adopted or
                inherited in this forward.
        """
        self._check(layer)
        assert self._indices is not None, "some layer wrote them"
        return self._indices

    def adopt(self, layer: int, indices: torch.Tensor) -> None:
        """Take over what an earlier pipeline stage selected for ``layer``."""
        self._sources, self._indices = self._sources_of(layer), indices
        self.writes += 1

    def inherit(self, layer: int, whole: IndexBuffer, rows: tuple[int, int], before: int) -> None:
        """Take over what the whole batch selected of which this is a part, if ``layer`` needs it.

        Args:
            layer: the layer that is about to ask.
            whole: the whole batch's buffer.
            rows: this part's in the whole batch, from and to below.
            before: the first layer that runs on parts.
        """
        # Later passes of a captured forward find the buffer full; they inherit anew.
        is_due = self._indices is None or len(self.rows.patterns) == 1
        if is_due and whole._indices is not None and self._shares_from_before(layer, before):
            self._sources, self._indices = whole._sources, whole._indices[slice(*rows)]
            self.writes += 1

    def _take(self, layer: int, selected: torch.Tensor) -> None:
        """Let the rows for which ``layer`` is F have ``selected``."""
        position = self._active.position(layer)
        self.writes += 1  # the next pass of a capture may select into the same tensor
        if self._written == position and selected is self._indices:
            return
        patterns = self.rows.patterns
        if not all(pattern.is_full(position) for pattern in patterns):
            self._check(layer, but=position)
            assert self._indices is not None, "the rows that are not F here have some"
            mine = self.rows.full_rows(position)[:, None]
            selected = torch.where(mine, selected, self._indices)
        self._indices, self._written = selected, position
        self._sources = tuple(
            position if pattern.is_full(position) else source
            for pattern, source in zip(patterns, self._sources, strict=True)
        )

    def _check(self, layer: int, but: int | None = None) -> None:
        """That each pattern's rows hold what its F layer before ``layer`` wrote.

        Args:
            layer: the layer that reads.
            but: patterns whose F layer is at this position are about to be written.
        """
        for expected, source in zip(self._sources_of(layer), self._sources, strict=True):
            if expected not in (source, but):
                held = "nothing" if source is None else f"those of position {source}"
                raise StaleIndexError(
                    f"layer {layer} shares the indices of pattern position {expected}, but the "
                    f"buffer holds {held}"
                )

    def _sources_of(self, layer: int) -> tuple[int, ...]:
        """For each pattern the position whose indices ``layer`` uses."""
        position = self._active.position(layer)
        return tuple(pattern.source_of(position) for pattern in self.rows.patterns)

    def _comes_from_earlier_stage(self, layer: int) -> bool:
        """Whether SGLang hands in what ``layer`` shares; it does so for one pattern only."""
        return self._shares_from_before(layer, self._first_layer)

    def _shares_from_before(self, layer: int, limit: int) -> bool:
        """Whether some row's indices for ``layer`` are of one below ``limit``, as it is not."""
        layers = self._active.plan.layer_ids
        return any(layers[source] < limit for source in self._sources_of(layer))
