"""Estimate of the loss that a pattern adds to another's, and of what few documents cannot show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sglang_indexcache.errors import SearchError
from sglang_indexcache.lab.stats.bounds import Estimate, unseen
from sglang_indexcache.lab.stats.pairs import Floats

CONFIDENCE = 0.95
ENOUGH = 32
"""Number of documents from which a difference may be called unlikely. With 32, the interval covers
the truth in at least 93 % of searches wherever a document in eight shows the loss, and with 8 in 65
% there (``benchmarks/results/search/interval.json``). """
HELD_OUT = 128
"""Number of documents that a comparison reads, if the data holds out so many. Of the shipped
checkpoint's 1/4, 2 documents of 96 carry what it loses. 32 documents hold neither in half of all
checks, 128 in 7 % (``benchmarks/results/search/interval.json``). """


def standard_error(values: Floats) -> float:
    """Return the standard error of the mean of ``[n]`` values; NaN for fewer than two."""
    if len(values) < 2:
        return float("nan")
    return float(values.std(ddof=1) / np.sqrt(len(values)))


@dataclass(frozen=True)
class Difference:
    """A paired difference over documents (other minus reference), in nats per token.

    Attributes:
        low: lower end of the mean's 95 % interval, by t corrected for skewness
            (:meth:`~.bounds.Estimate.interval`): a few documents often carry most of a loss, and
            Student's interval is then too low.
        high: upper end.
        each: difference of every document, in the order of the data.
    """

    mean: float
    low: float
    high: float
    each: tuple[float, ...]

    @classmethod
    def of(cls, differences: Floats, documents: Sequence[int] | None = None) -> Difference:
        """Estimate the mean from ``[n]`` paired differences.

        Args:
            documents: number of each difference's document; windows of one text depend on each
                other, so their mean is one observation. By default every difference has its own
                document.

        Raises:
            SearchError: there are fewer than two documents, which show nothing about the spread.
        """
        means = differences if documents is None else by_document(differences, documents)
        if len(means) < 2:
            raise SearchError(
                "a confidence interval needs at least two documents, of which windows of one text "
                "are one; give more"
            )
        estimate = Estimate.of(means)
        low, high = estimate.interval(CONFIDENCE)
        values = tuple(float(value) for value in means)
        return cls(float(estimate.mean), float(low), float(high), values)

    def numbers(self, *, sign: int = 1) -> dict[str, Any]:
        """Return the mean, its interval, and how many documents lose, as plain data.

        ``sign`` is -1 if less is worse.
        """
        lost = [value for value in self.each if sign * value > 0]
        return {
            **{name: round(getattr(self, name), 6) for name in ("mean", "low", "high")},
            **{"documents": len(self.each), "lost": len(lost)},
            "worst": round(sign * max(sign * value for value in self.each), 6),
        }

    @property
    def is_significant(self) -> bool:
        """Whether the interval excludes zero."""
        return self.low > 0 or self.high < 0

    @property
    def lost(self) -> int:
        """Number of documents with a higher loss."""
        return sum(value > 0 for value in self.each)

    @property
    def documents(self) -> str:
        """Text on the number of documents that lose, and on the worst of them."""
        phrase = f"{self.lost} of {len(self.each)} documents lose"
        if not self.lost:
            return phrase
        worst = max(self.each)
        return f"{phrase}, number {self.each.index(worst) + 1} most: {worst:+.5f}"


def by_document(values: Floats, documents: Sequence[int]) -> Floats:
    """Average ``[n]`` values by the number of each one's document, in the order of the data."""
    numbers = np.asarray(documents)
    return np.array([values[numbers == number].mean() for number in dict.fromkeys(documents)])


def unseen_in_words(documents: int) -> str:
    """Return text on the losses that so few documents may all miss, by the rule of three."""
    share = 100 * unseen(documents, 1 - CONFIDENCE)
    return (
        f"with {documents} documents, a loss that sits in up to {share:.0f} % of documents can go "
        "unseen"
    )
