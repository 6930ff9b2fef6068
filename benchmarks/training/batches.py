"""Rows of packed documents; row ``i`` of step ``s`` is a pure function of the seed.

So a run that was stopped goes on without replaying data.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from benchmarks.training.retrieval import MachineText, TaskDocument, TaskWords, window
from benchmarks.training.tasks import TASKS
from sglang_indexcache.errors import TrainingError
from sglang_indexcache.lab.heal.packing import PackedBatch

TEXT = "text"

IGNORED = -100
"""Label of a token that the LM loss does not count, as in torch's cross entropy."""


@dataclass(frozen=True)
class LabelledBatch(PackedBatch):
    """Packed rows, and what of them is learned.

    Attributes:
        labels: ``[B, T]`` int64, the token itself or :data:`IGNORED`; not shifted.
        answers: ``[B, T]`` bool, the tokens that answer a retrieval question.
    """

    labels: torch.Tensor
    answers: torch.Tensor

    def to(self, device: torch.device) -> LabelledBatch:
        """Return the same batch on ``device``."""
        return LabelledBatch(**{name: t.to(device) for name, t in vars(self).items()})


@dataclass(frozen=True)
class Mixture:
    """Mixture that a batch is made of.

    Attributes:
        tokenizer: with end-of-sequence and padding tokens.
        text: source text.
        words: of the retrieval tasks.
        weights: share of the rows by task name ("text", or a name in ``TASKS``).
        lengths: document lengths to choose from in a retrieval row, tokens.
        seed: of everything drawn.
        held_out: draw text from the held-out files.
    """

    tokenizer: PreTrainedTokenizerBase
    text: MachineText
    words: TaskWords
    weights: Mapping[str, float]
    lengths: Sequence[int]
    seed: int
    held_out: bool = False

    def batch(self, step: int, rows: Sequence[int], length: int) -> LabelledBatch:
        """Return the given rows of a step's batch, ``length`` tokens each."""
        return self.collate([self.row(step, row, length) for row in rows], length)

    def row(self, step: int, row: int, length: int) -> list[TaskDocument]:
        """Return the documents of one row."""
        draw = random.Random(f"{self.seed}/{self.held_out}/{step}/{row}")
        names, weights = zip(*self.weights.items(), strict=True)
        return self.documents(draw.choices(names, weights)[0], length, draw)

    def documents(self, task: str, length: int, draw: random.Random) -> list[TaskDocument]:
        """Draw as many documents of one task as fill ``length`` tokens."""
        source = self.text.part(self.held_out)
        if task == TEXT:
            ids = window(source, length, draw)
            return [TaskDocument(ids, [True] * length, [False] * length)]
        fitting = [n for n in self.lengths if n <= length]
        if not fitting:
            raise TrainingError(
                f"no entry of data.lengths fits a row of {length} tokens; give one that does"
            )
        size = draw.choice(fitting)
        return [TASKS[task](self.words, source, size, draw) for _ in range(length // size)]

    def collate(self, rows: Sequence[Sequence[TaskDocument]], length: int) -> LabelledBatch:
        """Pad packed rows to ``length`` tokens."""
        pieces = [tuple(np.asarray(d.ids, dtype=np.int32) for d in row) for row in rows]
        packed = PackedBatch.of(pieces, length, self.tokenizer.pad_token_id)
        labels = torch.full_like(packed.ids, IGNORED)
        answers = torch.zeros(packed.ids.shape, dtype=torch.bool)
        for row, documents in enumerate(rows):
            at = 0
            for document in documents:
                place = (row, slice(at, at + len(document)))
                learn = torch.tensor(document.learn)
                learn[0] = False  # nothing comes before it
                labels[place] = packed.ids[place].where(learn, torch.tensor(IGNORED))
                answers[place] = torch.tensor(document.answer)
                at += len(document)
        return LabelledBatch(**vars(packed), labels=labels, answers=answers)
