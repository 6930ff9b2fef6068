"""Sample size and power of a non-inferiority test."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_indexcache.errors import QualityError
from sglang_indexcache.stats.bounds import FEW, STAKES
from sglang_indexcache.stats.interim import boundaries, needed_drift

_SURELY_NOT_FEW: float = FEW + 2 * FEW**0.5
"""Contexts expected to differ with which there are hardly ever too few for t."""


MOST = 0.75
"""Of a stake that one lost context may take in a plan: single questions take the full one whole."""


@dataclass(frozen=True)
class Design:
    """The design of a group-sequential non-inferiority test, fixed before the first request.

    Attributes:
        contexts: sample size at the last look, in all cells together.
        margin: the non-inferiority margin: the loss that still counts as none; 0.01 is one point.
        looks: interim analyses and the final one, after equal shares of the contexts.
        alpha: one-sided error of each claim over all looks.
        power: with which a loss is to be found, or its absence shown.

    Raises:
        QualityError: a design that no evaluation can follow.
    """

    contexts: int
    margin: float = 0.01
    looks: int = 4
    alpha: float = 0.05
    power: float = 0.8

    def __post_init__(self) -> None:
        if not 0 < self.margin < 1:
            raise QualityError(
                f"a margin of {100 * self.margin:g} points is not above 0 and below 100"
            )
        if not 1 <= self.looks <= self.contexts:
            raise QualityError(
                f"{self.looks} looks need at least as many contexts, not {self.contexts}"
            )

    @property
    def fractions(self) -> tuple[float, ...]:
        """Of the contexts, at each look.

        A plan rounds up to whole rounds over its cells, so looks come a little later than here.
        That costs nothing: with these boundaries it only lowers the error, to 0.047 at most.
        """
        return tuple((look + 1) / self.looks for look in range(self.looks))

    @property
    def bounds(self) -> tuple[float, ...]:
        """Standard normal values that a claim must reach at each look."""
        return boundaries(self.fractions, self.alpha)

    @property
    def drift(self) -> float:
        """Standard errors of the whole evaluation that a difference needs to be found."""
        return needed_drift(self.fractions, self.alpha, self.power)

    def needed(self, deviation: float, differing: float, heaviest: float = 1.0) -> int:
        """Contexts with which "no loss beyond the margin" is shown of a pattern that loses nothing.

        Args:
            deviation: standard deviation of a context's difference, see :func:`spread`.
            differing: share of contexts that differ, 0 to 1.
            heaviest: see `bounds.Estimate.heaviest`; above 1 if cells are unequal.
        """
        return math.ceil(self._needed(self.margin, deviation, differing, heaviest) - 1e-9)

    def detectable(self, deviation: float, differing: float, heaviest: float = 1.0) -> float:
        """Smallest loss that is found with the design's power; also the smallest margin.

        Args:
            deviation: standard deviation of a context's difference.
            differing: share of contexts that differ, 0 to 1.
            heaviest: see `bounds.Estimate.heaviest`; above 1 if cells are unequal.
        """

        def enough(margin: float) -> bool:
            return self._needed(margin, deviation, differing, heaviest) <= self.contexts

        # Where the spread is large the bet's approximation gives up again near 1.
        high = next((step / 100 for step in range(1, 100) if enough(step / 100)), 1.0 - 1e-9)
        low = max(high - 0.01, 1e-9)
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (low, middle) if enough(middle) else (middle, high)
        return high

    def _needed(self, margin: float, deviation: float, differing: float, heaviest: float) -> float:
        """By the bet, or by t as soon as enough contexts differ for it.

        For t the normal size, and half a squared boundary for not knowing the deviation (Guenther
        1981, American Statistician 35:243), which the contexts that differ alone can tell. The bet
        is on differences that reach as far as the heaviest context moves the mean. Never fewer than
        a rare loss of whole contexts needs to be seen, see `bounds.unseen`.
        """
        from scipy.special import ndtr

        rare: float = math.log(ndtr(-self.bounds[-1])) / math.log1p(-margin / heaviest)
        known: float = (self.drift * deviation / margin) ** 2
        step = math.sqrt(deviation**2 / differing) / heaviest if differing else 0.0
        by_bet = max(known, self._bet_needs(margin / heaviest, deviation / heaviest, step))
        if not differing:
            return max(by_bet, rare)
        unknown: float = self.bounds[-1] ** 2 / 2
        by_t = max(known + unknown / differing, _SURELY_NOT_FEW / differing)
        return max(min(by_bet, by_t), rare)

    def _bet_needs(self, margin: float, deviation: float, step: float) -> float:
        """Contexts until one of the stakes, each a part of the capital, has won by itself.

        Its logarithm grows by what the margin wins in a context, less half the variance that it
        rides on, and spreads by the deviation. A stake of which one context that differs, which
        it does by ``step``, can take most is not counted on: it is gone as soon as one is lost.
        """
        from scipy.special import ndtr, ndtri

        goal = math.log(len(STAKES) / ndtr(-self.bounds[-1]))
        contexts = math.inf
        for stake in STAKES:
            if stake * step > MOST:
                continue
            spreads = stake * deviation / (1 - margin)
            growth = math.log1p(stake * margin / (1 - margin)) - spreads**2 / 2
            if growth > 0:
                luck = float(ndtri(self.power)) * spreads
                root = (luck + math.sqrt(luck**2 + 4 * growth * goal)) / (2 * growth)
                contexts = min(contexts, root**2)
        return contexts


def spread(discordance: float, correlation: float, questions: int) -> tuple[float, float]:
    """Deviation of a context's mean difference, and the share of contexts that differ.

    If the arms are equally good; the share is of contexts that all differ by the same, as
    `bounds.Estimate.differing` counts them. A question takes its context's fate with probability
    sqrt(correlation) and else its own, which gives that correlation.

    Args:
        discordance: share of paired questions that differ, 0 to 1.
        correlation: of two differences in the same context, 0 to 1.
        questions: behind one context.
    """
    second = fourth = 0.0
    for tied in range(questions + 1):
        free = questions - tied
        likely = (
            math.comb(questions, tied)
            * math.sqrt(correlation) ** tied
            * (1 - math.sqrt(correlation)) ** free
        )
        second += likely * discordance * (tied**2 + free)
        fourth += likely * discordance * (tied**4 + free)
        fourth += likely * discordance**2 * (6 * tied**2 * free + 3 * free * (free - 1))
    return math.sqrt(second) / questions, second**2 / fourth if fourth else 0.0


def spread_over_cells(
    cells: Sequence[tuple[int, int]], discordance: float, correlation: float
) -> tuple[float, float, float]:
    """Deviation, share of contexts that differ and weight of the heaviest, as Design takes them.

    As `bounds.Estimate` will find them. The primary result is a mean over cells, so what a small
    cell adds to its error, or may hide, is not made up for by a large one.

    Args:
        cells: contexts of each, and questions behind one of its contexts.
        discordance: see :func:`spread`.
        correlation: likewise.
    """
    total = sum(count for count, _ in cells)
    second = fourth = step = heaviest = 0.0
    for count, questions in cells:
        deviation, share = spread(discordance, correlation, questions)
        weight = total / (len(cells) * count)
        second += count / total * (weight * deviation) ** 2
        fourth += count / total * (weight * deviation) ** 4 / share
        step, heaviest = max(step, weight / questions), max(heaviest, weight)
    return math.sqrt(second), min(second**2 / fourth, second / step**2), heaviest
