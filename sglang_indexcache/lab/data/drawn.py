"""Drawing of documents from all over a source, so that names of files and folders do not matter."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from itertools import cycle
from pathlib import Path

from sglang_indexcache.lab.data.documents import Document, files_of, no_text, read_file

MOST = 4096
"""Largest number of documents drawn from one file; the whole file is read for them."""


def drawn_documents(source: str, seed: int) -> Iterator[tuple[Path, Document]]:
    """Yield documents with their files, in an order that the seed decides.

    Folders take turns, and so do the files in a folder; a file gives one document at a time. So the
    first documents come from as many places as possible. A file is read when its first turn comes.

    Args:
        source: as for :func:`~sglang_indexcache.lab.data.documents.read_documents`.

    Raises:
        DataError: nothing to read, or a row that nobody understands.
    """
    draw = random.Random(seed)
    by_folder: dict[Path, list[Path]] = defaultdict(list)
    for path in files_of(source):
        by_folder[path.parent].append(path)
    folders = list(by_folder.values())
    draw.shuffle(folders)
    for files in folders:
        draw.shuffle(files)
    is_empty = True
    for item in _in_turn([_in_turn([_of_file(f, seed) for f in files]) for files in folders]):
        is_empty = False
        yield item
    if is_empty:
        raise no_text(source)


def _in_turn(
    sources: list[Iterator[tuple[Path, Document]]],
) -> Iterator[tuple[Path, Document]]:
    """Take one of each in turn, until all have ended."""
    ended: set[int] = set()
    for number in cycle(range(len(sources))):
        if len(ended) == len(sources):
            return
        if number not in ended:
            for item in sources[number]:
                yield item
                break
            else:
                ended.add(number)


def _of_file(path: Path, seed: int) -> Iterator[tuple[Path, Document]]:
    """Yield documents of one file, drawn from all of it when the first is asked for."""
    for document in drawn(read_file(path), f"{seed} {path.name}", MOST):
        yield path, document


def drawn(
    documents: Iterable[Document], seed: int | str, least: int, characters: int = 0
) -> list[Document]:
    """Draw from all documents, in an order that the seed decides; only the drawn ones are held.

    Args:
        least: smallest number of documents, if there are so many.
        characters: smallest total length of the documents, if there is so much.
    """
    draw, total = random.Random(seed), 0
    heap: list[tuple[float, int, Document]] = []  # the top is last in the drawn order
    for number, document in enumerate(documents):
        heappush(heap, (-draw.random(), number, document))
        total += document.characters
        while len(heap) > least and total - heap[0][2].characters >= characters:
            total -= heappop(heap)[2].characters
    return [document for _, _, document in sorted(heap, reverse=True)]
