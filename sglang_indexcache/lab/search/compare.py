"""Do two patterns differ on this data? Paired over batches; and late in the context from early."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import numpy as np

from sglang_indexcache.lab.data.marking import Mask
from sglang_indexcache.lab.search.difference import ENOUGH, Difference, unseen_in_words
from sglang_indexcache.lab.search.evaluators import Floats, TokenEvaluator, counted_mean, in_threads
from sglang_indexcache.pattern import Pattern

SMALL = 0.01
"""A share of the reference's loss: words call a difference small, and an interval wide, by it."""


@dataclass(frozen=True)
class Comparison:
    """One pattern against the reference pattern; losses in nats per token.

    Attributes:
        difference: ``loss - reference_loss``, paired over batches.
        trend: what ``pattern`` adds in the last quarter of the positions minus what it adds in the
            first, paired over the sequences of which something counts in both: above zero means
            that sharing hurts more at long range. None where these are fewer than two.
    """

    reference: Pattern
    pattern: Pattern
    reference_loss: float
    loss: float
    difference: Difference
    trend: Difference | None

    @property
    def verdict(self) -> str:
        """The result in words: the size, what it tells, which documents lose, and the trend."""
        difference = self.difference
        unseen = unseen_in_words(len(difference.each))
        clauses = (self._meaning, difference.documents, self._trend, unseen)
        return f"{self._size}: {'; '.join(clauses)}."

    @property
    def _trend(self) -> str:
        if self.trend is None:
            return "what counts lies too close together to show a trend"
        if not self.trend.is_significant:
            return "no trend along the context shown"
        word = "more" if self.trend.mean > 0 else "less"
        return f"sharing costs {word} late in the context ({self.trend.mean:+.5f})"

    @property
    def _size(self) -> str:
        difference = self.difference
        relative = 100 * difference.mean / self.reference_loss
        interval = f"95 % interval {difference.low:+.5f} to {difference.high:+.5f}"
        return f"{difference.mean:+.5f} nats per token, {relative:+.2f} % ({interval})"

    @property
    def _meaning(self) -> str:
        difference, small = self.difference, SMALL * self.reference_loss
        largest, is_enough = max(-difference.low, difference.high), len(difference.each) >= ENOUGH
        if difference.is_significant:
            word = "higher" if difference.mean > 0 else "lower"
            return f"{word}, by less than {SMALL:.0%}" if is_enough and largest < small else word
        if largest > small:
            return "too few documents to tell whether the loss differs"
        if not is_enough:
            return f"no difference shown, and fewer than {ENOUGH} documents cannot exclude one"
        share = f"{largest / self.reference_loss:.2%}"
        return f"no difference shown; one above {share} is unlikely unless few documents hold it"

    def numbers(self) -> dict[str, Any]:
        """Return everything as plain data."""
        names = {"pattern": str(self.pattern), "reference": str(self.reference)}
        return {**asdict(self), **names, "verdict": self.verdict}


def compare(
    evaluator: TokenEvaluator,
    reference: Pattern,
    patterns: Sequence[Pattern],
    masks: Sequence[Sequence[Mask]],
) -> list[Comparison]:
    """Measure ``patterns`` against ``reference`` on every batch of ``evaluator``.

    Args:
        masks: for each batch the masks of its sequences
            (:attr:`~sglang_indexcache.lab.search.calibration.Calibration.batch_counted`).

    Raises:
        SearchError: fewer than two batches.
    """
    base, *measured = _losses(evaluator, [reference, *patterns])
    return [
        _compare(reference, base, pattern, losses, masks)
        for pattern, losses in zip(patterns, measured, strict=True)
    ]


def _losses(evaluator: TokenEvaluator, patterns: Sequence[Pattern]) -> list[list[list[Floats]]]:
    """Measure every batch under each pattern, as many at a time as the evaluator takes.

    Batches are asked one by one: what fails for a while is not asked again as a whole.
    """
    batches = range(len(evaluator.batch_tokens))
    cells = [(pattern, batch) for batch in batches for pattern in dict.fromkeys(patterns)]
    losses: dict[tuple[Pattern, int], list[Floats]] = {}

    def measure(cell: tuple[Pattern, int]) -> None:
        [losses[cell]] = evaluator.token_losses(cell[0], [cell[1]])

    in_threads(measure, cells, evaluator.in_flight)
    return [[losses[pattern, batch] for batch in batches] for pattern in patterns]


def _compare(
    reference: Pattern,
    base: Sequence[Sequence[Floats]],
    pattern: Pattern,
    other: Sequence[Sequence[Floats]],
    masks: Sequence[Sequence[Mask]],
) -> Comparison:
    before, after = (
        np.array([counted_mean(*pair) for pair in zip(losses, masks, strict=True)])
        for losses in (base, other)
    )
    difference = Difference.of(after - before)
    trend = _trend(_added(base, other, masks))
    return Comparison(
        reference, pattern, float(before.mean()), float(after.mean()), difference, trend
    )


def _added(
    base: Sequence[Sequence[Floats]],
    other: Sequence[Sequence[Floats]],
    counted: Sequence[Sequence[Mask]],
) -> Floats:
    """Return ``[sequences, positions]`` float64 that the other pattern adds; NaN if uncounted."""
    masks = list(chain.from_iterable(counted))
    added = np.full((len(masks), max(map(len, masks))), np.nan)
    losses = zip(chain.from_iterable(base), chain.from_iterable(other), masks, strict=True)
    for row, (before, after, mask) in zip(added, losses, strict=True):
        row[: len(mask)][mask] = (after - before)[mask]
    return added


def _trend(added: Floats) -> Difference | None:
    """Compare the last quarter of the positions that count with the first."""
    places = np.flatnonzero((~np.isnan(added)).any(axis=0))
    first, end = int(places[0]), int(places[-1]) + 1
    quarter = (end - first) // 4
    change = _means(added[:, end - quarter : end]) - _means(added[:, first : first + quarter])
    measured = change[~np.isnan(change)]
    return Difference.of(measured) if len(measured) > 1 else None


def _means(part: Floats) -> Floats:
    """Return ``[sequences]`` means of ``[sequences, positions]``; NaN where nothing counts."""
    is_counted = ~np.isnan(part)
    totals, numbers = np.where(is_counted, part, 0.0).sum(axis=1), is_counted.sum(axis=1)
    means: Floats = np.divide(totals, numbers, out=np.full(len(part), np.nan), where=numbers > 0)
    return means
