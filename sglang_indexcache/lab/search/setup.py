"""Setup of a search: a checkpoint and calibration data, checked before a model runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_indexcache.checkpoint import Checkpoint, reading
from sglang_indexcache.errors import SearchError
from sglang_indexcache.lab.data.documents import MACHINE
from sglang_indexcache.lab.data.marking import Marker
from sglang_indexcache.lab.runs.identity import GIVEN
from sglang_indexcache.lab.search.calibration import Calibration, Score
from sglang_indexcache.lab.search.evaluators import Evaluator
from sglang_indexcache.lab.search.reading import prepare
from sglang_indexcache.library.digest import checkpoint_digest
from sglang_indexcache.library.files import ModelInfo, entry_name
from sglang_indexcache.models import RECOGNISED_BY

DEFAULT_CONTEXT = 8
"""Default context, in multiples of the number of tokens that a query selects (``index_topk``)."""
ADVISED_CONTEXT = 4
"""Smallest such multiple that is used without a warning."""


@dataclass(frozen=True)
class Setup:
    """A checkpoint and its calibration data.

    Attributes:
        digest: digest of the checkpoint.
        name: the model's name, and prefix of found patterns' names.
        settings: the options that chose the data, for naming one that changed.
    """

    checkpoint: Checkpoint
    calibration: Calibration
    digest: str
    name: str
    seed: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(
        cls,
        model: Path,
        data: str = MACHINE,
        *,
        context: int | None = None,
        batches: int = 16,
        held_out: int = 0,
        least_held_out: int | None = None,
        seed: int = 0,
        score: Score | None = None,
    ) -> Setup:
        """Read a checkpoint folder and documents; the arguments are those of :func:`prepare`.

        Args:
            context: largest number of tokens in a sequence; by default :data:`DEFAULT_CONTEXT`
                times the number that a query selects.

        Raises:
            CheckpointError: the folder is no checkpoint of a DSA model.
            SearchError: queries select everything in such a context, the data cannot be read or is
                too short, or the tokenizer does not fit.
        """
        checkpoint, digest = Checkpoint.read(model), checkpoint_digest(model)
        topk = int(checkpoint.shape["index_topk"])
        context = DEFAULT_CONTEXT * topk if context is None else context
        if context <= topk:
            raise SearchError(
                f"a context of {context} tokens cannot tell patterns apart: this model's queries "
                f"select {topk} tokens (index_topk), so there they attend to everything, whatever "
                f"is shared. Take {DEFAULT_CONTEXT * topk} or more (--context)."
            )
        from transformers import AutoTokenizer

        with reading(f"the tokenizer of {model}"):
            tokenizer = AutoTokenizer.from_pretrained(model)
        calibration = prepare(
            data,
            Marker(tokenizer, str(model)),
            context=context,
            batches=batches,
            held_out=held_out,
            least_held_out=least_held_out,
            seed=seed,
            topk=topk,
            score=score,
        )
        settings = {
            "--data": calibration.source,
            "--context": context,
            "--batches": batches,
            "--held-out": calibration.held_out,
            "--seed": seed,
        }
        name = entry_name(model.resolve().name)
        return cls(checkpoint, calibration, digest, name, seed, settings)

    @property
    def model(self) -> ModelInfo:
        """Description by which the pattern library recognises the checkpoint."""
        shape = self.checkpoint.shape
        return ModelInfo(
            name=self.name,
            architectures=(self.checkpoint.architecture,),
            num_layers=self.checkpoint.num_layers,
            shape={key: shape[key] for key in RECOGNISED_BY if key in shape},
            note="Recognised by its shape; other weights of the same shape need a search of "
            "their own.",
        )

    @property
    def objective(self) -> str:
        """Text on the tokens whose loss is measured."""
        return self.calibration.objective.in_words()

    @property
    def data(self) -> str:
        """Text on the data."""
        return f"{self.calibration.source}, {self.calibration.size}"

    def identity(self, evaluator: Evaluator) -> dict[str, Any]:
        """Return the identity of a journal with this evaluator's losses.

        Raises:
            SearchError: the evaluator measures another model.
        """
        if evaluator.num_layers != self.checkpoint.num_layers:
            raise SearchError(
                f"the server serves {evaluator.num_layers} layers, the checkpoint in --model has "
                f"{self.checkpoint.num_layers}: these are two models"
            )
        return {
            "evaluator": evaluator.kind,
            "checkpoint": self.digest,
            "data": self.calibration.digest,
            "counted": self.objective,
            **({GIVEN: dict(self.settings)} if self.settings else {}),
        }

    @property
    def rows(self) -> Iterator[tuple[str, str]]:
        """Facts that a user should know before a model runs: a name and a sentence each."""
        yield "objective", f"loss of {self.objective} ({self.calibration.counts} in a batch)"
        yield "data", f"{self.data}: {self.calibration.reading}"
        if self.calibration.warning:
            yield "warning", self.calibration.warning
        if self.calibration.objective.score in (Score.LATE, Score.ALL):
            yield (
                "recall",
                "this hardly sees whether a pattern keeps what looks up something far back. Count "
                "passages that come again, and keys and rules, too (--score recall).",
            )
        lengths = sorted(map(len, self.calibration.sequences))
        half, topk = lengths[len(lengths) // 2], self.calibration.objective.topk
        if half < ADVISED_CONTEXT * topk:
            yield (
                "advice",
                f"half of the sequences have at most {half} tokens, which is short for a model "
                f"whose queries select {topk}: few of them have much to choose from. Take "
                f"{ADVISED_CONTEXT * topk} or more (--context, and data with documents as long).",
            )
