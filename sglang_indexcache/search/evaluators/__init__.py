"""What every search algorithm asks: how much does the model lose under this pattern?

``EvalLoss(M, D, c)`` of the paper's Algorithm 1, per calibration batch, so that two patterns can
be compared batch by batch (paired) and a candidate can be dropped before it has seen all data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sglang_indexcache.ask.pool import Pool
from sglang_indexcache.ask.score import Prompt, score
from sglang_indexcache.data.marking import Mask
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.calibration import Calibration

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class BatchLosses:
    """The answer to one question.

    Attributes:
        values: ``[batches]`` float64, mean language-modelling loss per counted token, in nats.
        layer_tokens: tokens forwarded times layers they went through; less than tokens times
            layers where an evaluator reused the layers below the first difference.
    """

    values: Floats
    layer_tokens: int

    @classmethod
    def of_tokens(
        cls,
        batches: Sequence[Sequence[Floats]],
        layer_tokens: int,
        counted: Sequence[Sequence[Mask]],
    ) -> BatchLosses:
        """From what :meth:`TokenEvaluator.token_losses` answers.

        Every batch weighs the same, whether few or many of its predictions count: patterns are
        compared batch by batch.

        Args:
            batches: for each batch the losses of its sequences.
            counted: for each batch the masks of its sequences.
        """
        means = [counted_mean(*pair) for pair in zip(batches, counted, strict=True)]
        return cls(np.array(means), layer_tokens)

    @property
    def mean(self) -> float:
        """Mean over the batches, nats per token."""
        return float(self.values.mean())


class Evaluator(Protocol):
    """Measures patterns on a fixed set of calibration batches.

    The same pattern on the same batch must give the same loss, and no pattern may profit from
    state that another one left behind.
    """

    @property
    def kind(self) -> str:
        """What measures, for a journal's identity: numbers of two kinds are never mixed."""

    @property
    def num_layers(self) -> int:
        """Length of a pattern."""

    @property
    def batch_tokens(self) -> tuple[int, ...]:
        """Tokens forwarded by each calibration batch."""

    @property
    def in_flight(self) -> int:
        """How many patterns it can measure at the same time (from as many threads)."""

    def loss(self, pattern: Pattern, batches: Sequence[int]) -> BatchLosses:
        """Measure ``pattern`` on the calibration batches with these numbers."""


class TokenEvaluator(Evaluator, Protocol):
    """An evaluator that can also say where in the context the loss arises."""

    def token_losses(self, pattern: Pattern, batches: Sequence[int]) -> list[list[Floats]]:
        """For each batch, for each of its sequences, ``[length - 1]`` losses in nats.

        Entry i is the loss of predicting token i + 1 from tokens 0..i.
        """


def counted_mean(losses: Sequence[Floats], counted: Sequence[Mask]) -> float:
    """Mean over the counted predictions of a batch's sequences, each ``[length - 1]``."""
    kept = [each[mask] for each, mask in zip(losses, counted, strict=True)]
    return float(np.concatenate(kept).mean())


def standard_error(values: Floats) -> float:
    """Standard error of the mean of ``[n]`` values; NaN for fewer than two."""
    if len(values) < 2:
        return float("nan")
    return float(values.std(ddof=1) / np.sqrt(len(values)))


class ServedEvaluator:
    """Teacher-forced log-probabilities of running engines, which may serve others too.

    Each request names its pattern. All sequences of a call go out as one request, so data-parallel
    ranks work side by side. Calls may be made from ``in_flight`` threads.

    Args:
        pool: of engines. What they serve to others, and under which pattern, does not matter.
    """

    kind = "sglang"

    def __init__(self, pool: Pool, calibration: Calibration) -> None:
        self._pool = pool
        self.calibration = calibration
        self.batch_tokens = calibration.batch_tokens
        self.num_layers = len(pool.checkpoint[1])
        self.in_flight = pool.in_flight

    def loss(self, pattern: Pattern, batches: Sequence[int]) -> BatchLosses:
        """See :class:`Evaluator`."""
        tokens = sum(self.batch_tokens[batch] for batch in batches)
        losses = self.token_losses(pattern, batches)
        counted = self.calibration.counted_in(batches)
        return BatchLosses.of_tokens(losses, tokens * self.num_layers, counted)

    def token_losses(self, pattern: Pattern, batches: Sequence[int]) -> list[list[Floats]]:
        """See :class:`TokenEvaluator`."""
        cut = self.calibration.batches
        # Scored from their beginning: then no engine reads them from its cache.
        prompts = [
            Prompt(ids, str(pattern), scored=len(ids) - 1)
            for batch in batches
            for ids in cut[batch]
        ]
        scores = iter(self._pool.ask(lambda engine: score(engine, prompts)))
        return [[-np.array(next(scores).logprobs) for _ in cut[batch]] for batch in batches]
