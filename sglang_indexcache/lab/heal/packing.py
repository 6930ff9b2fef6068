"""Visibility of keys to a query: causal, within its document, and never across padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sglang_indexcache.errors import TrainingError

if TYPE_CHECKING:
    from sglang_indexcache.lab.data.packed import PackedRow

PADDING = -1
"""Document number of a token that only fills a row."""


@dataclass(frozen=True)
class Layout:
    """Description of packed rows in O(L); masks are made for one block of queries at a time.

    A loss may use only some queries of a row: these Q places are then in ``queries``, and tensors
    by query have Q entries instead of T. There are always T keys.

    Attributes:
        documents: ``[B, T]`` integers; tokens see each other only if their numbers are equal.
            :data:`PADDING` marks padding, which counts in no loss.
        queries: ``[Q]`` places of the queries, ascending; None for every token.
    """

    documents: torch.Tensor
    queries: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.documents.dim() != 2 or self.documents.is_floating_point():
            raise TrainingError(
                "documents must be an integer tensor [batch, tokens], got "
                f"{self.documents.dtype} {list(self.documents.shape)}"
            )

    def to(self, device: torch.device) -> Layout:
        """Return the same layout on a device."""
        queries = None if self.queries is None else self.queries.to(device)
        return Layout(self.documents.to(device), queries)

    @property
    def length(self) -> int:
        """Number of tokens per row."""
        return self.documents.shape[1]

    @property
    def query_documents(self) -> torch.Tensor:
        """Document of each query, ``[B, Q]`` integers."""
        return self.documents if self.queries is None else self.documents[:, self.queries]

    @property
    def counted(self) -> torch.Tensor:
        """Queries that count in a loss, ``[B, Q]`` bool."""
        return self.query_documents != PADDING

    def places(self, rows: slice) -> torch.Tensor:
        """Return the places ``[rows]`` of the queries ``rows`` among all tokens."""
        if self.queries is None:
            return torch.arange(rows.start, rows.stop, device=self.documents.device)
        return self.queries[rows]

    def reach(self, rows: slice) -> int:
        """Return S, the number of keys that a block of queries sees: none after its last query."""
        return rows.stop if self.queries is None else int(self.queries[rows.stop - 1]) + 1

    def visible(self, rows: slice) -> torch.Tensor:
        """Return visibility as ``[B, rows, S]`` bool, over the S keys within :meth:`reach`.

        A query always sees itself, so no row is ever empty.
        """
        reach = self.reach(rows)
        keys = torch.arange(reach, device=self.documents.device)
        is_same_document = self.query_documents[:, rows, None] == self.documents[:, None, :reach]
        return is_same_document & (keys <= self.places(rows)[:, None])

    def sees(self, rows: slice, places: torch.Tensor) -> torch.Tensor:
        """Return whether queries ``rows`` see their keys ``places``, as ``[B, rows, k]`` bool."""
        batch = torch.arange(len(places), device=places.device)[:, None, None]
        is_same_document = self.documents[batch, places] == self.query_documents[:, rows, None]
        return is_same_document & (places <= self.places(rows)[:, None])

    def attended(self, rows: slice, selected: torch.Tensor | None) -> torch.Tensor:
        """Return the visible keys, or only ``selected`` ones if given, as ``[B, rows, S]`` bool.

        ``selected`` has ``[B, Q, k]`` top-k indices, padded with -1.
        """
        visible = self.visible(rows)
        if selected is None:
            return visible
        return visible & selected_mask(selected[:, rows], self.length)[..., : self.reach(rows)]

    def blocks(self, size: int) -> Iterator[slice]:
        """Yield the queries in blocks of ``size``, starting with the last block.

        The last block sees the most keys, so the memory that it frees is enough for every other
        block. In the other order each block would need a little more than any earlier one had
        freed, and a caching allocator would end up holding O(L^2).
        """
        if size < 1:
            raise TrainingError(f"a block holds at least one query, got {size}")
        count = self.query_documents.shape[1]
        for start in reversed(range(0, count, size)):
            yield slice(start, min(start + size, count))


@dataclass(frozen=True)
class PackedBatch:
    """``B`` rows of ``T`` tokens.

    Attributes:
        ids: ``[B, T]`` int64.
        documents: ``[B, T]`` int64, the document of each token within its row;
            :data:`PADDING` fills a row up.
        positions: ``[B, T]`` int64, counted from 0 in each document.
    """

    ids: torch.Tensor
    documents: torch.Tensor
    positions: torch.Tensor

    @classmethod
    def of(cls, rows: Sequence[PackedRow], length: int, padding: int) -> PackedBatch:
        """Pad rows to ``length`` tokens with the token id ``padding``."""
        shape = (len(rows), length)
        batch = cls(
            ids=torch.full(shape, padding),
            documents=torch.full(shape, PADDING),
            positions=torch.zeros(shape, dtype=torch.int64),
        )
        for number, row in enumerate(rows):
            start = 0
            for document, piece in enumerate(row):
                place = (number, slice(start, start + len(piece)))
                batch.ids[place] = torch.from_numpy(piece).long()
                batch.documents[place] = document
                batch.positions[place] = torch.arange(len(piece))
                start += len(piece)
        return batch


def selected_mask(indices: torch.Tensor, keys: int) -> torch.Tensor:
    """Return a ``[B, b, keys]`` bool mask from ``[B, b, k]`` top-k indices, padded with -1."""
    mask = torch.zeros(*indices.shape[:2], keys + 1, dtype=torch.bool, device=indices.device)
    # -1 is written to a spare last column, which is dropped.
    mask.scatter_(-1, indices.long().where(indices >= 0, keys), True)
    return mask[..., :keys]
