"""Interim analyses by alpha spending: looking before the end without more errors than promised.

A *look* is one planned analysis of a group-sequential test. Lan and DeMets (1983, Biometrika
70:659) spend the error alpha over the looks; their function of the O'Brien-Fleming kind,
``2 - 2 Phi(z(alpha/2) / sqrt(t))``, spends nearly nothing early, so that the last boundary stays
close to that of a single look. The boundaries follow by the recursive integration of Armitage,
McPherson and Rowe (1969): a statistic with independent increments, its density carried from look to
look over the region in which the evaluation goes on.

The same boundaries serve both questions, "no loss beyond the margin" and "a loss", each at its own
one-sided alpha and each unaware of the other's stops, which can only lower its error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from sglang_indexcache.stats.pairs import Floats

NODES = 256
"""Of each integral; twice as many move no boundary by 1e-6."""
_FAR = 9.0
"""Standard deviations beyond which a normal density is nothing."""


def spent(fraction: float, alpha: float) -> float:
    """Error that may have been made by ``fraction`` (0 to 1) of the planned contexts."""
    from scipy.special import ndtr, ndtri

    if fraction <= 0:
        return 0.0
    return float(2 * ndtr(ndtri(alpha / 2) / min(fraction, 1.0) ** 0.5))


@cache
def boundaries(fractions: tuple[float, ...], alpha: float) -> tuple[float, ...]:
    """What a standard normal statistic must reach at each look, one-sided.

    Args:
        fractions: of the planned contexts at each look, rising, at most 1.
        alpha: the whole one-sided error, 0 to 0.5.
    """
    from scipy.optimize import brentq

    found: list[float] = []
    for look, fraction in enumerate(fractions):
        due = spent(fraction, alpha) - spent(fractions[look - 1] if look else 0.0, alpha)
        crossing = _crossing(fractions[: look + 1], found, drift=0.0)
        found.append(brentq(lambda z, at=crossing, due=due: at(z) - due, -_FAR, _FAR, xtol=1e-10))
    return tuple(found)


def crossing_probability(
    fractions: Sequence[float], bounds: Sequence[float], drift: float = 0.0
) -> float:
    """How often a statistic reaches one of its bounds.

    Args:
        fractions: of the planned contexts at each look.
        bounds: z at each look.
        drift: mean of the statistic at fraction 1; 0 under the null hypothesis.
    """
    return sum(
        _crossing(fractions[: look + 1], bounds[:look], drift)(bounds[look])
        for look in range(len(bounds))
    )


@cache
def needed_drift(fractions: tuple[float, ...], alpha: float, power: float) -> float:
    """Mean at fraction 1 with which a bound is reached with probability ``power``.

    A difference is found so often if it is this many standard errors of the whole evaluation.
    """
    from scipy.optimize import brentq

    bounds = boundaries(fractions, alpha)
    return float(brentq(lambda d: crossing_probability(fractions, bounds, d) - power, 0.0, _FAR))


def _crossing(
    fractions: Sequence[float], bounds: Sequence[float], drift: float
) -> Callable[[float], float]:
    """P(first crossing at the last look), as a function of the z that counts there.

    Carries the density of the score ``B(t) = z sqrt(t)``, a Brownian motion with drift.
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
    """Of Gauss and Legendre on -1 to 1, with their weights: an eigenvalue problem to solve once."""
    return np.polynomial.legendre.leggauss(NODES)
