"""Do two patterns differ on this data? Paired over batches, and along the context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from sglang_indexcache.errors import SearchError
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.evaluators import Floats, TokenEvaluator
from sglang_indexcache.support.stats import half_width

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Difference:
    """A paired difference (other minus reference) with its confidence interval, in nats."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, differences: Floats) -> Difference:
        """From ``[n]`` paired differences; Student's t at :data:`CONFIDENCE`.

        Raises:
            SearchError: fewer than two pairs, which say nothing about spread.
        """
        half = half_width(differences, CONFIDENCE)
        if half is None:
            raise SearchError("a confidence interval needs at least two batches; give more")
        mean = float(differences.mean())
        return cls(mean, mean - half, mean + half)

    @property
    def is_significant(self) -> bool:
        """Whether the interval excludes zero."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class Comparison:
    """One pattern against the reference pattern.

    Attributes:
        reference: what it is compared with.
        pattern: what is compared.
        reference_loss: nats per token.
        loss: nats per token.
        difference: ``loss - reference_loss``, paired over batches.
        edges: ``[buckets + 1]`` positions that bound the buckets of the curve.
        curve: the difference in each bucket of positions, paired over sequences.
        trend: the last quarter of the context minus the first, paired over sequences: above zero
            means that sharing hurts more at long range.
    """

    reference: Pattern
    pattern: Pattern
    reference_loss: float
    loss: float
    difference: Difference
    edges: tuple[int, ...]
    curve: tuple[Difference, ...]
    trend: Difference

    @property
    def verdict(self) -> str:
        """The result in a sentence."""
        relative = 100 * self.difference.mean / self.reference_loss
        interval = f"95 % interval {self.difference.low:+.5f} to {self.difference.high:+.5f}"
        if not self.difference.is_significant:
            first = f"No difference shown: {self.difference.mean:+.5f} nats per token ({interval})"
        else:
            word = "higher" if self.difference.mean > 0 else "lower"
            first = (
                f"The loss is {word} by {abs(self.difference.mean):.5f} nats per token "
                f"({relative:+.3f} %, {interval})"
            )
        if not self.trend.is_significant:
            return f"{first}; no trend along the context shown."
        word = "more" if self.trend.mean > 0 else "less"
        return f"{first}; sharing costs {word} late in the context ({self.trend.mean:+.5f})."

    def numbers(self) -> dict[str, Any]:
        """Everything as plain data."""
        return {
            "pattern": str(self.pattern),
            "reference_pattern": str(self.reference),
            "loss": self.loss,
            "reference_loss": self.reference_loss,
            "difference": asdict(self.difference),
            "edges": list(self.edges),
            "curve": [asdict(point) for point in self.curve],
            "trend": asdict(self.trend),
            "verdict": self.verdict,
        }


def compare(
    evaluator: TokenEvaluator,
    reference: Pattern,
    others: Sequence[Pattern],
    buckets: int = 8,
    uncounted: int = 0,
) -> list[Comparison]:
    """Measure ``others`` against ``reference`` on every batch of ``evaluator``.

    Args:
        evaluator: measures.
        reference: what the others are compared with.
        others: what is compared.
        buckets: points of the curve.
        uncounted: predictions at the start of each sequence to leave out
            (:attr:`~sglang_indexcache.search.calibration.Calibration.uncounted`).

    Raises:
        SearchError: fewer than two batches, or fewer than four tokens counted in a sequence.
    """

    def measure(pattern: Pattern) -> list[Floats]:
        """For each batch ``[sequences, counted]`` losses."""
        batches = range(len(evaluator.batch_tokens))
        losses = evaluator.token_losses(pattern, batches)
        return [np.stack(sequences)[:, uncounted:] for sequences in losses]

    base = measure(reference)
    return [_compare(reference, base, p, measure(p), buckets, uncounted) for p in others]


def _compare(
    reference: Pattern,
    base: list[Floats],
    pattern: Pattern,
    mine: list[Floats],
    buckets: int,
    uncounted: int,
) -> Comparison:
    by_batch = np.array([b.mean() - a.mean() for a, b in zip(base, mine, strict=True)])
    tokens = np.concatenate(mine) - np.concatenate(base)  # [sequences, counted]
    length = tokens.shape[1]
    if length < 4:
        raise SearchError(
            f"the context is too short for a curve; take at least {uncounted + 5} tokens"
        )
    edges = np.linspace(0, length, min(buckets, length) + 1).astype(int)
    quarter = length // 4
    return Comparison(
        reference=reference,
        pattern=pattern,
        reference_loss=float(np.mean([a.mean() for a in base])),
        loss=float(np.mean([b.mean() for b in mine])),
        difference=Difference.of(by_batch),
        edges=tuple(uncounted + int(edge) for edge in edges),
        curve=tuple(
            Difference.of(tokens[:, start:stop].mean(axis=1)) for start, stop in pairwise(edges)
        ),
        trend=Difference.of(tokens[:, -quarter:].mean(axis=1) - tokens[:, :quarter].mean(axis=1)),
    )
