"""The design of a group-sequential non-inferiority test: its size, its power and its boundaries.

A *look* is one planned (interim) analysis. Lan and DeMets (1983, Biometrika 70:659) spend the error
alpha over the looks; their function of the O'Brien-Fleming kind, ``2 - 2 Phi(z(alpha/2) /
sqrt(t))``, spends nearly nothing early, so that the last boundary stays close to that of a single
look. The boundaries follow by the recursive integration of Armitage, McPherson and Rowe (1969): a
statistic with independent increments, its density carried from look to look over the region in
which the evaluation continues.

The same boundaries serve both claims, "no loss beyond the margin" and "a loss", each at its own
one-sided alpha. Each ignores that the other may stop the evaluation, which can only lower its
error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from sglang_indexcache.errors import QualityError
from sglang_indexcache.lab.stats.bounds import FEW, STAKES
from sglang_indexcache.lab.stats.pairs import Floats

_SURELY_NOT_FEW: float = FEW + 2 * FEW**0.5
"""Expected number of differing contexts at which there are hardly ever too few for t."""
MOST = 0.75
"""Largest share of a stake that one lost context may take in a plan; with a single question per
context it takes all of the full stake."""
NODES = 256
"""Number of nodes of each integral; twice as many move no boundary by 1e-6."""
_FAR = 9.0
"""Number of standard deviations beyond which a normal density is negligible."""


@dataclass(frozen=True)
class Design:
    """The design of a group-sequential non-inferiority test, fixed before the first request.

    Attributes:
        contexts: sample size at the last look, in all cells together.
        margin: the loss that still counts as none; 0.01 is one point.
        looks: number of interim analyses and the final one, after equal shares of the contexts.
        alpha: one-sided error of each claim over all looks.

    Raises:
        QualityError: no evaluation can follow the design.
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
        """Shares of the contexts at each look.

        A plan rounds up to whole rounds over its cells, so looks come a little later than here.
        With these boundaries that only lowers the error, to 0.047 at most.
        """
        return tuple((look + 1) / self.looks for look in range(self.looks))

    @property
    def bounds(self) -> tuple[float, ...]:
        """Standard normal values that a claim must reach at each look."""
        return boundaries(self.fractions, self.alpha)

    @property
    def errors(self) -> tuple[float, ...]:
        """Error that each look may spend, for exact tests; the errors add up to alpha."""
        until = [spent(fraction, self.alpha) for fraction in self.fractions]
        return tuple(float(part) for part in np.diff(until, prepend=0.0))

    @property
    def drift(self) -> float:
        """Difference detected with the design's power, in standard errors of an evaluation."""
        return needed_drift(self.fractions, self.alpha, self.power)

    def needed(self, deviation: float, differing: float, heaviest: float = 1.0) -> int:
        """Return how many contexts show "no loss beyond the margin" for a harmless pattern.

        Args:
            deviation: standard deviation of a context's difference, as from :func:`spread`.
            differing: share of contexts that differ, 0 to 1.
            heaviest: as `bounds.Estimate.heaviest`; above 1 if cells are unequal.
        """
        return math.ceil(self._needed(self.margin, deviation, differing, heaviest) - 1e-9)

    def detectable(self, deviation: float, differing: float, heaviest: float = 1.0) -> float:
        """Return the smallest loss detected with the design's power; also the smallest margin."""

        def enough(margin: float) -> bool:
            return self._needed(margin, deviation, differing, heaviest) <= self.contexts

        # With a large spread the bet's approximation fails again near 1.
        high = next((step / 100 for step in range(1, 100) if enough(step / 100)), 1.0 - 1e-9)
        low = max(high - 0.01, 1e-9)
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (low, middle) if enough(middle) else (middle, high)
        return high

    def _needed(self, margin: float, deviation: float, differing: float, heaviest: float) -> float:
        """Return the contexts that the bet needs, or that t needs if enough contexts differ for it.

        For t this is the normal sample size, plus half a squared boundary because the deviation is
        unknown (Guenther 1981, American Statistician 35:243), and only contexts that differ show
        it. The bet is on differences up to the step of the heaviest context. The number is never
        too small to see a rare loss of whole contexts (`bounds.unseen`).
        """
        from scipy.special import ndtr

        rare: float = math.log(ndtr(-self.bounds[-1])) / math.log1p(-margin / heaviest)
        by_spread: float = (self.drift * deviation / margin) ** 2
        step = math.sqrt(deviation**2 / differing) / heaviest if differing else 0.0
        by_bet = max(by_spread, self._bet_needs(margin / heaviest, deviation / heaviest, step))
        if not differing:
            return max(by_bet, rare)
        unknown: float = self.bounds[-1] ** 2 / 2
        by_t = max(by_spread + unknown / differing, _SURELY_NOT_FEW / differing)
        return max(min(by_bet, by_t), rare)

    def _bet_needs(self, margin: float, deviation: float, step: float) -> float:
        """Count the contexts until one of the stakes, each with its part of the wealth, wins alone.

        A stake's log-wealth grows per context by the stake times the margin, minus half the
        variance, and varies by the stake times the deviation. A stake is left out if one differing
        context, which differs by ``step``, can take more than :data:`MOST` of it, because the first
        loss would ruin it.
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
    """Return the deviation of a context's mean difference, and the share that differs.

    Both assume that the arms are equally good. The share counts contexts as if all that differ did
    so by the same amount, like `bounds.Estimate.differing`. A question shares its context's outcome
    with probability sqrt(correlation) and is otherwise independent, which gives that correlation.
    ``discordance`` is the share of paired questions that differ, 0 to 1.
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
    """Return the deviation, the share of contexts that differ, and the heaviest weight, for Design.

    They match those of `bounds.Estimate`. The primary result is a mean over cells, so a large cell
    does not make up for the error that a small cell adds, or for losses that it may hide. Each
    entry of ``cells`` has the cell's number of contexts, and of questions per context.
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


def spent(fraction: float, alpha: float) -> float:
    """Return the error that may be spent by ``fraction`` (0 to 1) of the contexts."""
    from scipy.special import ndtr, ndtri

    if fraction <= 0:
        return 0.0
    return float(2 * ndtr(ndtri(alpha / 2) / min(fraction, 1.0) ** 0.5))


@cache
def boundaries(fractions: tuple[float, ...], alpha: float) -> tuple[float, ...]:
    """Return the boundary of a standard normal statistic at each look, one-sided.

    Args:
        fractions: share of the planned contexts at each look, rising, at most 1.
        alpha: the whole one-sided error, 0 to 0.5.
    """
    from scipy.optimize import brentq

    bounds: list[float] = []
    for look, fraction in enumerate(fractions):
        due = spent(fraction, alpha) - spent(fractions[look - 1] if look else 0.0, alpha)
        crossing = _crossing(fractions[: look + 1], bounds, drift=0.0)
        bounds.append(brentq(lambda z, at=crossing, due=due: at(z) - due, -_FAR, _FAR, xtol=1e-10))
    return tuple(bounds)


def crossing_probability(
    fractions: Sequence[float], bounds: Sequence[float], drift: float = 0.0
) -> float:
    """Return the probability that a statistic reaches one of its bounds, a z for each look.

    Args:
        fractions: share of the planned contexts at each look.
        drift: mean of the statistic at fraction 1; 0 under the null hypothesis.
    """
    return sum(
        _crossing(fractions[: look + 1], bounds[:look], drift)(bounds[look])
        for look in range(len(bounds))
    )


@cache
def needed_drift(fractions: tuple[float, ...], alpha: float, power: float) -> float:
    """Return the mean at fraction 1 with which a bound is reached with ``power``.

    A difference of this many standard errors of the whole evaluation is detected with that power.
    """
    from scipy.optimize import brentq

    bounds = boundaries(fractions, alpha)
    return float(brentq(lambda d: crossing_probability(fractions, bounds, d) - power, 0.0, _FAR))


def _crossing(
    fractions: Sequence[float], bounds: Sequence[float], drift: float
) -> Callable[[float], float]:
    """Return P(first crossing at the last look), as a function of the bound z at that look.

    It carries the density of the score ``B(t) = z sqrt(t)``, a Brownian motion with drift.
    """
    from scipy.special import ndtr

    unit, weight = _nodes()
    at, mass, time = np.zeros(1), np.ones(1), 0.0
    for fraction, bound in zip(fractions, bounds, strict=False):
        low, high = drift * fraction - _FAR * fraction**0.5, bound * fraction**0.5
        nodes = low + (high - low) * (unit + 1) / 2
        step = fraction - time
        density = np.exp(-((nodes[:, None] - at - drift * step) ** 2) / (2 * step))
        mass = density @ mass / (2 * np.pi * step) ** 0.5 * weight * (high - low) / 2
        at, time = nodes, fraction
    last = fractions[-1]
    step, start, carried = last - time, at, mass

    def probability(z: float) -> float:
        beyond: Floats = ndtr((start + drift * step - z * last**0.5) / step**0.5)
        return float(beyond @ carried)

    return probability


@cache
def _nodes() -> tuple[Floats, Floats]:
    """Return Gauss-Legendre nodes on -1 to 1 and weights, from an eigenvalue problem."""
    return np.polynomial.legendre.leggauss(NODES)
