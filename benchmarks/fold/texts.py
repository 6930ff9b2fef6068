"""Texts of three kinds, and rows in which a passage comes again."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.training.retrieval import MachineText, TaskWords
from benchmarks.training.tasks import TASKS

PASSAGE, ANSWERED, DISTANCE = 48, 40, 700
"""A passage's tokens, how many of its last are asked, and after how many tokens it comes again."""
LEAD, IN_ADVANCE = 60, 256
"""Tokens before a passage; the text loss is that of the tokens behind so many."""

HELD_OUT = 0.25
"""The last part of a text file is asked, the rest is for fitting."""


@dataclass(frozen=True)
class Question:
    """A row and what is counted of it.

    Attributes:
        ids: ``[T]``.
        answers: positions of tokens that are recalled.
        text: positions of tokens whose loss is the text's.
        boundary: from where on tokens would be decoded.
    """

    ids: torch.Tensor
    answers: torch.Tensor
    text: torch.Tensor
    boundary: int


class Texts:
    """Tokens by kind: "code" is this machine's Python, others are files ``KIND.txt`` of a folder.

    Args:
        tokenizer: of the model.
        folder: with files; None where code is all there is.
    """

    def __init__(self, tokenizer: Any, folder: Path | None) -> None:
        self.tokenizer = tokenizer
        code = MachineText.read(tokenizer, 4_000_000)
        self._parts: dict[str, tuple[torch.Tensor, torch.Tensor]] = {
            "code": (torch.from_numpy(code.train).long(), torch.from_numpy(code.held_out).long())
        }
        for path in sorted(folder.glob("*.txt")) if folder else ():
            ids = torch.tensor(tokenizer(path.read_text()).input_ids)
            cut = int(len(ids) * (1 - HELD_OUT))
            self._parts[path.stem] = ids[:cut], ids[cut:]
        self.kinds = tuple(self._parts)

    def fitting(self, kind: str, number: int, length: int) -> torch.Tensor:
        """``[length]`` tokens for fitting; texts of other numbers lie elsewhere."""
        return _window(self._parts[kind][0], number, length)

    def asked(self, kind: str, number: int, length: int) -> torch.Tensor:
        """``[length]`` tokens that nothing is fitted to."""
        return _window(self._parts[kind][1], number, length)

    def passage(self, kind: str, number: int) -> Question:
        """Text in which a passage comes again: 40 of its tokens are asked."""
        length = LEAD + DISTANCE
        text = self.asked(kind, number, length)
        ids = torch.cat([text, text[LEAD : LEAD + PASSAGE]])
        return Question(
            ids,
            torch.arange(len(ids) - ANSWERED, len(ids)),
            torch.arange(IN_ADVANCE, length),
            length + PASSAGE - ANSWERED,
        )

    def task(self, name: str, number: int, length: int) -> Question:
        """A document of the small checkpoint's tasks."""
        words = TaskWords(self.tokenizer)
        held_out = self._parts["code"][1].int().numpy()
        draw = random.Random(f"fold/{name}/{number}")
        document = TASKS[name](words, held_out, length, draw)
        answers = torch.tensor(document.answer).nonzero()[:, 0]
        return Question(torch.tensor(document.ids), answers, torch.tensor([]), int(answers[0]))

    def plain(self, kind: str, number: int, length: int) -> Question:
        """Text alone."""
        ids = self.asked(kind, number, length)
        return Question(ids, torch.tensor([]), torch.arange(length // 4, length), length)


def _window(ids: torch.Tensor, number: int, length: int) -> torch.Tensor:
    """Window ``number`` from the start, going round at the end at another offset."""
    places = (len(ids) - length) // length
    start = (number % places) * length + (number // places) * 101
    return ids[start : start + length]
