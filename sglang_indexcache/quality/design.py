"""How many contexts a margin needs, and what loss a number of contexts can show."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np

from sglang_indexcache.errors import QualityError
from sglang_indexcache.quality.inference import capital
from sglang_indexcache.quality.looks import boundaries, needed_drift

QUESTIONS = 8
"""Behind one context."""


@dataclass(frozen=True)
class Design:
    """What is fixed before the first request.

    Attributes:
        contexts: at the last look, in all cells together.
        margin: the loss that still counts as none; 0.01 is one point of right answers.
        looks: how often is judged, at equal steps.
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
            raise QualityError(f"a margin of {self.margin} is not above 0 and below 1")
        if not (0 < self.alpha < 0.5 < self.power < 1):
            raise QualityError(f"alpha {self.alpha} must be below 0.5 and power {self.power} above")
        if not 1 <= self.looks <= self.contexts:
            raise QualityError(f"{self.looks} looks need at least as many contexts")

    @property
    def fractions(self) -> tuple[float, ...]:
        """Of the contexts, at each look."""
        return tuple((look + 1) / self.looks for look in range(self.looks))

    @property
    def bounds(self) -> tuple[float, ...]:
        """Standard normal values that a claim must reach at each look."""
        return boundaries(self.fractions, self.alpha)

    @property
    def drift(self) -> float:
        """Standard errors of the whole evaluation that a difference needs to be found."""
        return needed_drift(self.fractions, self.alpha, self.power)

    def detectable(self, deviation: float) -> float:
        """Smallest loss that is found with the design's power; also the smallest margin.

        Args:
            deviation: standard deviation of a context's difference, see :func:`deviation`.
        """
        exact: float = 1 - _none_differ(self.alpha) ** (1 / self.contexts)
        return max(self.drift * deviation / math.sqrt(self.contexts), exact)

    def needed(self, deviation: float) -> int:
        """Contexts with which "no loss beyond the margin" is shown of a pattern that loses nothing.

        However little differs, as many are needed as the bet on nothing differing takes.
        """
        normal = (self.drift * deviation / self.margin) ** 2
        exact = math.log(_none_differ(self.alpha)) / math.log1p(-self.margin)
        return math.ceil(max(normal, exact) - 1e-9)


def deviation(discordance: float, correlation: float, questions: int = QUESTIONS) -> float:
    """Standard deviation of a context's mean difference, if the arms are equally good.

    Args:
        discordance: share of paired questions that differ, 0 to 1.
        correlation: of two differences in the same context, 0 to 1.
        questions: behind one context.
    """
    variance: float = discordance * (1 + (questions - 1) * correlation) / questions
    return math.sqrt(variance)


@cache
def _none_differ(alpha: float) -> float:
    """``(1 - loss)^G`` at which the bet on G equal contexts has made 1/alpha; below ``alpha``.

    Found at G = 1000; it is the same within 0.1 % from 100 contexts on.
    """
    from scipy.optimize import brentq

    contexts = 1000
    nothing = np.zeros(contexts)
    loss = brentq(lambda m: math.log(capital(nothing, 1.0, -m) * alpha), 1e-9, 0.5)
    return float((1 - loss) ** contexts)
