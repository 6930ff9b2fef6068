"""Boundaries against published tables, and against a simulated random walk."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_indexcache.stats.interim import (
    boundaries,
    crossing_probability,
    needed_drift,
    spent,
)

# Lan-DeMets bounds of the O'Brien-Fleming kind at one-sided 0.025 and equal steps, as the programs
# of Reboussin, DeMets, Kim and Lan (Controlled Clinical Trials 21:190, 2000) give them.
PUBLISHED = {
    2: (2.963, 1.969),
    3: (3.710, 2.511, 1.993),
    4: (4.333, 2.963, 2.359, 2.014),
    5: (4.877, 3.357, 2.680, 2.290, 2.031),
}


def steps(looks: int) -> tuple[float, ...]:
    return tuple((look + 1) / looks for look in range(looks))


@pytest.mark.parametrize("looks", PUBLISHED)
def test_boundaries_are_the_published_ones(looks: int) -> None:
    assert boundaries(steps(looks), 0.025) == pytest.approx(PUBLISHED[looks], abs=6e-4)


def test_classical_boundaries_cross_as_often_as_published() -> None:
    # Jennison and Turnbull (2000), tables 2.1 and 2.3: C_P(5, 0.05) = 2.413, C_B(5, 0.05) = 2.040,
    # two-sided; the chance of crossing both sides is nothing.
    pocock, fleming = [2.413] * 5, [2.040 * (5 / k) ** 0.5 for k in range(1, 6)]
    assert crossing_probability(steps(5), pocock) == pytest.approx(0.025, abs=5e-5)
    assert crossing_probability(steps(5), fleming) == pytest.approx(0.025, abs=5e-5)


def test_one_look_is_the_normal_quantile_and_all_alpha() -> None:
    assert boundaries((1.0,), 0.05) == pytest.approx((1.644854,), abs=1e-6)
    assert spent(0.0, 0.05) == 0
    assert spent(1.0, 0.05) == pytest.approx(0.05)


def test_unequal_looks_and_power_against_a_random_walk() -> None:
    fractions, alpha, power = (0.1, 0.45, 0.8, 1.0), 0.05, 0.8
    draw = np.random.default_rng(4)
    walks = 200_000
    drift = needed_drift(fractions, alpha, power)
    sizes = np.diff((0.0, *fractions))
    score = np.cumsum(draw.normal(0, sizes**0.5, (walks, 4)), axis=1)
    z = score / np.sqrt(fractions)
    bounds = np.array(boundaries(fractions, alpha))
    wrong = (z > bounds).any(axis=1).mean()
    found = (z + drift * np.sqrt(fractions) > bounds).any(axis=1).mean()
    assert wrong == pytest.approx(alpha, abs=6 * (alpha * (1 - alpha) / walks) ** 0.5)
    assert found == pytest.approx(power, abs=6 * (power * (1 - power) / walks) ** 0.5)
