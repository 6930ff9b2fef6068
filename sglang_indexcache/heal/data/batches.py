"""Rows of packed documents; row ``i`` of step ``s`` is a pure function of the seed.

So a run resumes without replaying data, and any number of processes see the same global batch.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from sglang_indexcache.errors import TrainingError
from sglang_indexcache.heal.data.files import FILES, FileRows
from sglang_indexcache.heal.data.retrieval import TASKS, Document, TaskWords
from sglang_indexcache.heal.data.text import Text, window
from sglang_indexcache.heal.packing import IGNORED, PADDING

TEXT = "text"


@dataclass(frozen=True)
class Batch:
    """``B`` rows of ``T`` tokens.

    Attributes:
        ids: ``[B, T]`` int64.
        labels: ``[B, T]`` int64, the token itself or :data:`IGNORED`; not shifted.
        documents: ``[B, T]`` int64, the document of each token within its row; :data:`PADDING`
            fills it up.
        positions: ``[B, T]`` int64, counted from 0 in each document.
        answers: ``[B, T]`` bool, the tokens that answer a retrieval question.
    """

    ids: torch.Tensor
    labels: torch.Tensor
    documents: torch.Tensor
    positions: torch.Tensor
    answers: torch.Tensor

    def to(self, device: torch.device) -> Batch:
        """The same batch on ``device``."""
        return Batch(*(tensor.to(device) for tensor in vars(self).values()))


@dataclass(frozen=True)
class Mixture:
    """What a batch is made of.

    Attributes:
        tokenizer: with end-of-sequence and padding tokens.
        text: source text.
        words: of the retrieval tasks.
        weights: share of the rows by task name ("text", "files" or a name in ``TASKS``).
        lengths: document lengths to choose from in a retrieval row, tokens.
        seed: of everything drawn.
        held_out: draw text from the held-out files.
        files: rows of a user's files, of the length that batches are asked for.
    """

    tokenizer: PreTrainedTokenizerBase
    text: Text
    words: TaskWords
    weights: Mapping[str, float]
    lengths: Sequence[int]
    seed: int
    held_out: bool = False
    files: FileRows | None = None

    def __post_init__(self) -> None:
        known = [TEXT, *TASKS, *([FILES] if self.files is not None else [])]
        if unknown := sorted(set(self.weights) - set(known)):
            raise TrainingError(
                f"data.mixture names {', '.join(unknown)}; there are {', '.join(known)}"
            )

    def batch(self, step: int, rows: Sequence[int], length: int) -> Batch:
        """The given rows of a step's global batch, ``length`` tokens each."""
        return self.collate([self.row(step, row, length) for row in rows], length)

    def row(self, step: int, row: int, length: int) -> list[Document]:
        """The documents of one row."""
        draw = random.Random(f"{self.seed}/{self.held_out}/{step}/{row}")
        names, weights = zip(*self.weights.items(), strict=True)
        return self.documents(draw.choices(names, weights)[0], length, draw)

    def documents(self, task: str, length: int, draw: random.Random) -> list[Document]:
        """As many documents of one task as fill ``length`` tokens."""
        if task == FILES and self.files is not None:
            return [piece.document() for piece in draw.choice(self.files.part(self.held_out))]
        source = self.text.part(self.held_out)
        if task == TEXT:
            ids = window(source, length, draw)
            return [Document(ids, [True] * length, [False] * length)]
        fitting = [n for n in self.lengths if n <= length]
        if not fitting:
            raise TrainingError(
                f"no entry of data.lengths fits a row of {length} tokens; give one that does"
            )
        each = draw.choice(fitting)
        return [TASKS[task](self.words, source, each, draw) for _ in range(length // each)]

    def collate(self, rows: Sequence[Sequence[Document]], length: int) -> Batch:
        """Pad packed rows to ``length`` tokens."""
        return collate(rows, length, self.tokenizer.pad_token_id)


def collate(rows: Sequence[Sequence[Document]], length: int, padding: int) -> Batch:
    """Pad packed rows to ``length`` tokens.

    Args:
        rows: the documents of each.
        length: tokens.
        padding: the token id that fills a row up.
    """
    shape = (len(rows), length)
    batch = Batch(
        ids=torch.full(shape, padding),
        labels=torch.full(shape, IGNORED),
        documents=torch.full(shape, PADDING),
        positions=torch.zeros(shape, dtype=torch.int64),
        answers=torch.zeros(shape, dtype=torch.bool),
    )
    for row, documents in enumerate(rows):
        at = 0
        for number, document in enumerate(documents):
            here = (row, slice(at, at + len(document)))
            batch.ids[here] = torch.tensor(document.ids)
            learn = torch.tensor(document.learn)
            learn[0] = False  # nothing comes before it
            batch.labels[here] = batch.ids[here].where(learn, torch.tensor(IGNORED))
            batch.documents[here] = number
            batch.positions[here] = torch.arange(len(document))
            batch.answers[here] = torch.tensor(document.answer)
            at += len(document)
    return batch
