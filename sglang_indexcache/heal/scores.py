"""What a finished checkpoint can do, as numbers for tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_indexcache.adapter import Adapter
from sglang_indexcache.checkpoint import Checkpoint
from sglang_indexcache.heal.checkpoints import load
from sglang_indexcache.heal.data.batches import TEXT, Mixture
from sglang_indexcache.heal.data.retrieval import TASKS, TaskWords, chance
from sglang_indexcache.heal.data.text import TEXT_CHARACTERS, Text, unigram_loss
from sglang_indexcache.heal.evaluate import Score, evaluate
from sglang_indexcache.heal.model import DistilledModel
from sglang_indexcache.heal.sharing import Stage
from sglang_indexcache.library import Library
from sglang_indexcache.stats.student import half_width

EVERY_TASK = (TEXT, *TASKS)


class Scorer:
    """A loaded checkpoint under one pattern, to be scored as often as wanted.

    Args:
        checkpoint: folder, as the trainer writes it.
        pattern: in any form that the pattern library resolves.
        text_characters: of the machine's text.
        adapter: whose indexers take the places of the checkpoint's.

    Raises:
        CheckpointError: not such a checkpoint, or an adapter of another.
        PatternError, LibraryError: not a pattern, or one that needs an indexer that the
            checkpoint lacks, or one that the adapter was not trained for.
    """

    def __init__(
        self,
        checkpoint: Path,
        pattern: str = "full",
        text_characters: int = TEXT_CHARACTERS,
        adapter: Adapter | None = None,
    ) -> None:
        self.pattern = Library.default().resolve(pattern, Checkpoint.read(checkpoint)).pattern
        if adapter is not None:
            adapter.check(checkpoint, self.pattern)
        model, self._tokenizer = load(checkpoint)
        if adapter is not None:
            # Its file was checked to hold every tensor of these indexers and nothing else.
            model.load_state_dict(adapter.tensors(), strict=False)
        self._text = Text.of_machine(self._tokenizer, text_characters)
        self._words = TaskWords(self._tokenizer)
        self.unigram_loss = unigram_loss(
            self._text.train, self._text.held_out, model.config.vocab_size
        )
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
        weights = {TEXT: 1.0}
        mixture = Mixture(
            self._tokenizer, self._text, self._words, weights, [length], 0, held_out=True
        )
        self._model.sharing.topk = topk or self._topk
        stage = Stage.DENSE if dense else Stage.SPARSE
        scores = evaluate(self._model, mixture, list(tasks), rows, length, stage)
        return {
            "pattern": str(self.pattern),
            "length": length,
            "topk": None if dense else self._model.sharing.topk,
            "unigram_loss": self.unigram_loss,
            "tasks": {
                score.task: _summary(score, length, len(self._words.names)) for score in scores
            },
        }


def evaluate_checkpoint(
    checkpoint: Path,
    pattern: str = "full",
    length: int = 512,
    rows: int = 32,
    topk: int | None = None,
    dense: bool = False,
    text_characters: int = TEXT_CHARACTERS,
) -> dict[str, Any]:
    """Load a checkpoint and score it once; see :class:`Scorer`."""
    return Scorer(checkpoint, pattern, text_characters).scores(length, rows, topk, dense)


def _summary(score: Score, length: int, names: int) -> dict[str, Any]:
    return {
        "loss": score.loss,
        "accuracy": score.accuracy,
        "chance": chance(score.task, length, names) if score.task in TASKS else None,
        "tokens": score.tokens,
        "per_document_95": interval(score.per_row),
        "per_row": list(score.per_row),
        "loss_per_row": list(score.loss_per_row),
    }


def interval(values: tuple[float, ...]) -> list[float] | None:
    """95 % confidence interval of the mean (Student); none for fewer than two values."""
    half = half_width(values)
    if half is None:
        return None
    mean = sum(values) / len(values)
    return [mean - half, mean + half]
