"""A user's files as packed rows of one length, reproducible from a seed."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from sglang_indexcache.errors import TrainingError
from sglang_indexcache.lab.data.documents import Document, read_documents
from sglang_indexcache.lab.data.drawn import drawn
from sglang_indexcache.lab.data.marking import HELD_OUT_SHARE, Marker

CHARACTERS_OF_A_TOKEN = 8
"""Characters per token, more than any tokenizer has; if it is not enough, rows repeat sooner."""

LEAST = 64
"""Smallest number of documents drawn, so that some are held out and some are not."""

Piece = NDArray[np.int32]
"""``[length]`` token ids of a document, or of a window of a longer one."""

PackedRow = tuple[Piece, ...]


@dataclass
class _Packer:
    """Packer of pieces into rows, in order; a piece that does not fit starts a new row."""

    length: int
    limit: int
    rows: list[PackedRow] = field(default_factory=list)
    begun: list[Piece] = field(default_factory=list)

    @property
    def full(self) -> bool:
        return len(self.rows) >= self.limit

    def add(self, piece: Piece) -> None:
        if sum(map(len, self.begun)) + len(piece) > self.length:
            self.close()
        self.begun.append(piece)

    def close(self) -> None:
        if self.begun and not self.full:
            self.rows.append(tuple(self.begun))
        self.begun = []


@dataclass(frozen=True)
class FileRows:
    """Training rows, in an order that the seed decides, and rows of held-out documents."""

    train: tuple[PackedRow, ...]
    held_out: tuple[PackedRow, ...]
    seed: int = 0

    @classmethod
    def read(
        cls,
        sources: Sequence[str],
        marker: Marker,
        length: int,
        train: int,
        held_out: int,
        seed: int = 0,
    ) -> FileRows:
        """Draw documents from all of the data, then tokenise, split and pack as many as needed.

        A document with more than ``length`` tokens is cut into windows. A digest of its tokens
        decides whether a document, with all its windows, is held out.

        Args:
            sources: as for :func:`~sglang_indexcache.lab.data.documents.read_documents`.
            length: largest number of tokens in a row.
            train: largest number of training rows.
            held_out: largest number of held-out rows.
            seed: seed for drawing documents and for the order of rows.

        Raises:
            DataError: nothing to read, or a row that nobody understands.
            TrainingError: there is no row to train on, or none to hold out though some are wanted.
        """
        parts = {False: _Packer(length, train), True: _Packer(length, held_out)}
        share = HELD_OUT_SHARE
        rows = max(-(-train * share // (share - 1)), held_out * share)
        # Everything is read, so that a sorting of files by topic does not bias the training.
        everything = chain.from_iterable(map(read_documents, sources))
        documents = drawn(everything, seed, LEAST, rows * length * CHARACTERS_OF_A_TOKEN)
        for held_back, piece in _pieces(documents, marker, length):
            parts[held_back].add(piece)
            if all(part.full for part in parts.values()):
                break
        for part in parts.values():
            part.close()
        packed = cls(tuple(parts[False].rows), tuple(parts[True].rows), seed)
        if not packed.train or (held_out and not packed.held_out):
            raise TrainingError(
                f"{', '.join(sources)} gives {len(packed.train)} rows of {length} tokens to train "
                f"on and {len(packed.held_out)} to hold out (one document in four is held out, "
                "whole, so it takes several). Give more documents, or split a long text into some."
            )
        return packed

    def drawn(self, number: int) -> PackedRow:
        """Return training row ``number``; each epoch has every row once, in its own order."""
        epoch, place = divmod(number, len(self.train))
        order = list(range(len(self.train)))
        random.Random(f"{self.seed}/{epoch}").shuffle(order)
        return self.train[order[place]]

    @property
    def digest(self) -> str:
        """SHA-256 over all tokens, equal for equal data."""
        content = hashlib.sha256()
        for row in (*self.train, *self.held_out):
            content.update(b"\n" + b" ".join(piece.tobytes() for piece in row))
        return content.hexdigest()


def _pieces(
    documents: Iterable[Document], marker: Marker, length: int
) -> Iterator[tuple[bool, Piece]]:
    """Yield each document, or each of its windows, with whether the document is held out."""
    for document in documents:
        marked = marker.marked(document)
        held_back = marker.is_held_out(document, marked)
        ids = np.asarray(marked.ids, dtype=np.int32)
        for start in range(0, len(ids), length):
            yield held_back, ids[start : start + length]
