"""Which keys a query may see: causal, within its document, never across padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sglang_indexcache.errors import TrainingError

if TYPE_CHECKING:
    from sglang_indexcache.data.packed import PackedRow

PADDING = -1
"""Document number of a token that only fills a row."""


@dataclass(frozen=True)
class Layout:
    """Packed rows, described in O(L); masks are made for a block of queries at a time.

    Attributes:
        documents: ``[B, T]`` integers; tokens see each other only with the same number.
            :data:`PADDING` marks padding, which counts in no loss.
    """

    documents: torch.Tensor

    def __post_init__(self) -> None:
        if self.documents.dim() != 2 or self.documents.is_floating_point():
            raise TrainingError(
                "documents must be an integer tensor [batch, tokens], got "
                f"{self.documents.dtype} {list(self.documents.shape)}"
            )

    @property
    def length(self) -> int:
        """Tokens per row."""
        return self.documents.shape[1]

    @property
    def counted(self) -> torch.Tensor:
        """``[B, T]`` bool: the queries that count in a loss."""
        return self.documents != PADDING

    def visible(self, rows: slice) -> torch.Tensor:
        """``[B, rows, rows.stop]`` bool: nothing after the last of ``rows`` is seen by any.

        A query always sees itself, so no row is ever empty.
        """
        keys = torch.arange(rows.stop, device=self.documents.device)
        same = self.documents[:, rows, None] == self.documents[:, None, : rows.stop]
        return same & (keys <= keys[rows, None])

    def sees(self, rows: slice, places: torch.Tensor) -> torch.Tensor:
        """``[B, rows, S]`` bool: whether queries ``rows`` see keys ``places``, ``[B, rows, S]``."""
        queries = torch.arange(rows.start, rows.stop, device=places.device)
        batch = torch.arange(len(places), device=places.device)[:, None, None]
        same = self.documents[batch, places] == self.documents[:, rows, None]
        return same & (places <= queries[:, None])

    def attended(self, rows: slice, selected: torch.Tensor | None) -> torch.Tensor:
        """``[B, rows, rows.stop]`` bool: the visible keys, only the ``selected`` ones if given.

        These are ``[B, T, k]`` top-k indices padded with -1.
        """
        visible = self.visible(rows)
        if selected is None:
            return visible
        return visible & selected_mask(selected[:, rows], self.length)[..., : rows.stop]

    def blocks(self, size: int) -> Iterator[slice]:
        """Cut the queries into blocks of ``size``, the last of them first.

        It sees the most keys, so what it takes and frees can serve every other block. From the
        first on, each would take a little more than any before had freed, and an allocator that
        keeps what is freed would come to hold O(L^2).
        """
        if size < 1:
            raise TrainingError(f"a block holds at least one query, got {size}")
        for start in reversed(range(0, self.length, size)):
            yield slice(start, min(start + size, self.length))


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
            at = 0
            for document, piece in enumerate(row):
                here = (number, slice(at, at + len(piece)))
                batch.ids[here] = torch.from_numpy(piece).long()
                batch.documents[here] = document
                batch.positions[here] = torch.arange(len(piece))
                at += len(piece)
        return batch


def selected_mask(indices: torch.Tensor, keys: int) -> torch.Tensor:
    """``[B, b, keys]`` bool of ``[B, b, k]`` top-k indices, -1 where fewer than k were visible."""
    mask = torch.zeros(*indices.shape[:2], keys + 1, dtype=torch.bool, device=indices.device)
    # -1 goes to a spare last column, which is dropped.
    mask.scatter_(-1, indices.long().where(indices >= 0, keys), True)
    return mask[..., :keys]
