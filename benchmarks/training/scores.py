"""Scores of a checkpoint on held-out documents of the tasks, as numbers for tables."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.training.batches import TEXT, LabelledBatch, Mixture
from benchmarks.training.model import DistilledModel, Losses
from benchmarks.training.retrieval import MachineText, TaskDocument, TaskWords, Tokens
from benchmarks.training.tasks import TASKS, TEXT_CHARACTERS, chance
from sglang_indexcache.checkpoint import Checkpoint
from sglang_indexcache.lab.heal.forward_state import Stage
from sglang_indexcache.lab.stats.bounds import half_width
from sglang_indexcache.library.resolve import Library

EVERY_TASK = (TEXT, *TASKS)
BATCH_ROWS = 4
"""Rows of one forward pass."""


@dataclass(frozen=True)
class Score:
    """One task's result.

    Attributes:
        task: "text" or a retrieval task.
        loss: nats per scored token: all tokens of text, the answers of a retrieval task.
        accuracy: share of scored tokens whose most probable prediction is right.
        tokens: scored tokens.
        per_row: accuracy (text: loss) of each row, for paired statistics.
    """

    task: str
    loss: float
    accuracy: float
    tokens: int
    per_row: tuple[float, ...]

    @property
    def value(self) -> float:
        """The loss of text, the accuracy of a retrieval task."""
        return self.loss if self.task == TEXT else self.accuracy


@torch.no_grad()
def evaluate(
    model: DistilledModel,
    mixture: Mixture,
    tasks: Sequence[str],
    rows: int,
    length: int,
    stage: Stage = Stage.SPARSE,
    seed: int = 0,
) -> list[Score]:
    """Score every task.

    Args:
        model: left in the mode it was in.
        mixture: gives words and held-out text.
        tasks: of :data:`EVERY_TASK`.
        rows: documents of each task.
        length: tokens of each document.
        stage: attention over everything (``DENSE``) or over the selection (``SPARSE``).
        seed: of the documents.
    """
    was_training = model.training
    model.eval()
    try:
        return [
            _score(model, task, _batches(mixture, task, rows, length, seed), stage)
            for task in tasks
        ]
    finally:
        model.train(was_training)


def document(mixture: Mixture, task: str, length: int, seed: int, row: int) -> TaskDocument:
    """Return evaluation document ``row`` of a task, ``length`` tokens of held-out material."""
    draw = random.Random(f"evaluation/{seed}/{task}/{length}/{row}")
    if task == TEXT:
        return mixture.documents(TEXT, length, draw)[0]
    return TASKS[task](mixture.words, mixture.text.part(mixture.held_out), length, draw)


def _batches(
    mixture: Mixture, task: str, rows: int, length: int, seed: int
) -> Iterator[LabelledBatch]:
    for start in range(0, rows, BATCH_ROWS):
        numbers = range(start, min(start + BATCH_ROWS, rows))
        documents = [[document(mixture, task, length, seed, row)] for row in numbers]
        yield mixture.collate(documents, length)


def _score(
    model: DistilledModel, task: str, batches: Iterator[LabelledBatch], stage: Stage
) -> Score:
    device = next(model.parameters()).device
    losses: list[torch.Tensor] = []
    hits: list[torch.Tensor] = []
    for batch in batches:
        moved = batch.to(device)
        outcome: Losses = model(moved.ids, moved.labels, moved.documents, moved.positions, stage)
        masks = moved.labels[:, 1:] >= 0 if task == TEXT else moved.answers[:, 1:]
        for row, mask in enumerate(masks):
            losses.append(outcome.token_nats[row, :-1][mask])
            hits.append(outcome.token_hits[row, :-1][mask].float())
    rows = losses if task == TEXT else hits
    return Score(
        task=task,
        loss=float(torch.cat(losses).mean()),
        accuracy=float(torch.cat(hits).mean()),
        tokens=sum(len(row) for row in losses),
        per_row=tuple(float(row.mean()) for row in rows),
    )


class Scorer:
    """A loaded checkpoint under one pattern, to be scored as often as wanted.

    Args:
        checkpoint: folder, as the trainer writes it.
        pattern: in any form that the pattern library resolves.
        text_characters: of the machine's text.

    Raises:
        CheckpointError: not such a checkpoint.
        PatternError, LibraryError: not a pattern, or one that needs an indexer that the
            checkpoint lacks.
    """

    def __init__(
        self,
        checkpoint: Path,
        pattern: str = "full",
        text_characters: int = TEXT_CHARACTERS,
    ) -> None:
        self.pattern = Library.default().resolve(pattern, Checkpoint.read(checkpoint)).pattern
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        text = MachineText.read(tokenizer, text_characters)
        self._words = TaskWords(tokenizer)
        self._mixture = Mixture(tokenizer, text, self._words, {TEXT: 1.0}, [], 0, held_out=True)
        self.unigram_loss = unigram_loss(text.train, text.held_out, model.config.vocab_size)
        self._model = DistilledModel(model, self.pattern)
        self._topk = self._model.sharing.topk

    def scores(
        self,
        length: int = 512,
        rows: int = 32,
        topk: int | None = None,
        dense: bool = False,
        tasks: Sequence[str] = EVERY_TASK,
    ) -> dict[str, Any]:
        """Score held-out documents.

        Args:
            length: tokens of each document.
            rows: documents of each task.
            topk: replaces index_topk.
            dense: attend to every visible key.
            tasks: of :data:`EVERY_TASK`.

        Returns:
            The set-up, the unigram loss of the held-out text, and each task's :class:`Score` with
            a 95 % confidence interval over documents and the accuracy of guessing.
        """
        self._model.sharing.topk = topk or self._topk
        stage = Stage.DENSE if dense else Stage.SPARSE
        scores = evaluate(self._model, self._mixture, tasks, rows, length, stage)
        return {
            "pattern": str(self.pattern),
            "length": length,
            "topk": None if dense else self._model.sharing.topk,
            "unigram_loss": self.unigram_loss,
            "tasks": {
                score.task: _summary(score, length, len(self._words.names)) for score in scores
            },
        }


def unigram_loss(train: Tokens, test: Tokens, vocab_size: int) -> float:
    """Return nats per token of ``test`` under ``train``'s add-one unigram frequencies.

    What a model without any context reaches; a language model must be far below.
    """
    counts = np.bincount(train, minlength=vocab_size) + 1.0
    return float(-np.log(counts / counts.sum())[test].mean())


def _summary(score: Score, length: int, names: int) -> dict[str, Any]:
    return {
        "loss": score.loss,
        "accuracy": score.accuracy,
        "chance": chance(score.task, length, names) if score.task in TASKS else None,
        "tokens": score.tokens,
        "per_document_95": _interval(score.per_row),
        "per_row": list(score.per_row),
    }


def _interval(values: tuple[float, ...]) -> list[float] | None:
    """Return the mean's 95 % confidence interval (Student); none for fewer than two values."""
    half = half_width(values)
    mean = sum(values) / len(values)
    return None if half is None else [mean - half, mean + half]
