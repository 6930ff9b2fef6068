"""Texts to fit slopes to, and questions: the small checkpoint's own, and SmolLM2's books."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from benchmarks.smollm2.books import HELD_OUT, TRAIN, Books, rows
from benchmarks.training.retrieval import MachineText, TaskWords
from benchmarks.training.tasks import TASKS

CUTS = 16
"""Cuts of the training books that fits read the first of."""


@dataclass(frozen=True)
class Question:
    """A row and what is counted of it.

    Attributes:
        task: names what is recalled; "" where nothing is.
        ids: ``[T]``.
        answers: positions of tokens that are recalled.
        text: positions of tokens whose loss is the text's.
        boundary: from where on tokens would be decoded.
    """

    task: str
    ids: torch.Tensor
    answers: torch.Tensor
    text: torch.Tensor
    boundary: int


class Texts(Protocol):
    """The texts of one model.

    Attributes:
        kinds: of text; slopes are fitted to the first, and asked how they carry over to others.
    """

    kinds: tuple[str, ...]

    def fitting(self, kind: str, number: int, length: int) -> torch.Tensor:
        """Return ``[length]`` tokens for fitting; texts of other numbers lie elsewhere."""

    def asked(self, kind: str, number: int, length: int) -> torch.Tensor:
        """Return ``[length]`` tokens that nothing is fitted to."""

    def questions(self, number: int, count: int, length: int) -> list[Question]:
        """Return what is counted of row ``number`` of ``count``."""


class Code:
    """This machine's Python, whose files are divided into fitted and held-out ones.

    Args:
        tokenizer: of the model.
    """

    kinds: tuple[str, ...] = ("code",)

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.text = MachineText.read(tokenizer, 4_000_000)

    def fitting(self, _: str, number: int, length: int) -> torch.Tensor:
        """See :class:`Texts`."""
        return _window(torch.from_numpy(self.text.train).long(), number, length)

    def asked(self, _: str, number: int, length: int) -> torch.Tensor:
        """See :class:`Texts`."""
        return _window(torch.from_numpy(self.text.held_out).long(), number, length)

    def questions(self, number: int, _: int, length: int) -> list[Question]:
        """Ask the small checkpoint's tasks, and text alone."""
        ids, none = self.asked("code", number, length), torch.tensor([])
        plain = Question("", ids, none, torch.arange(length // 4, length), length)
        return [self._task(name, number, length) for name in ("recall", "needles")] + [plain]

    def _task(self, name: str, number: int, length: int) -> Question:
        words = TaskWords(self.tokenizer)
        held_out = self.text.held_out.astype("int32")
        document = TASKS[name](words, held_out, length, random.Random(f"fold/{name}/{number}"))
        answers = torch.tensor(document.answer).nonzero()[:, 0]
        return Question(
            name, torch.tensor(document.ids), answers, torch.tensor([]), int(answers[0])
        )


class BooksAndCode:
    """SmolLM2's books, and this machine's Python beside them.

    Args:
        cache: of the books.
        tokenizer: of the model.
    """

    kinds: tuple[str, ...] = ("books", "code")

    def __init__(self, cache: Path, tokenizer: Any) -> None:
        self.books, self.code = Books(cache, tokenizer), Code(tokenizer)

    def fitting(self, kind: str, number: int, length: int) -> torch.Tensor:
        """See :class:`Texts`."""
        if kind == "code":
            return self.code.fitting(kind, number, length)
        cuts = self.books.cuts(TRAIN, CUTS, length)
        return cuts[number * 5 % CUTS]  # the first few come from all over the books

    def asked(self, kind: str, number: int, length: int) -> torch.Tensor:
        """See :class:`Texts`."""
        if kind == "code":
            return self.code.asked(kind, number, length)
        return rows(self.books, HELD_OUT, 8, length)[number].ids

    def questions(self, number: int, count: int, length: int) -> list[Question]:
        """Ask the row of the other studies of this model: text, then passages of it again."""
        row = rows(self.books, HELD_OUT, count, length)[number]
        return [Question("recall", row.ids, row.recall, row.text, int(row.text[-1]) + 1)]


def _window(ids: torch.Tensor, number: int, length: int) -> torch.Tensor:
    """Return window ``number`` from the start, going round at the end at another offset."""
    windows = (len(ids) - length) // length
    start = (number % windows) * length + (number // windows) * 101
    return ids[start : start + length]
