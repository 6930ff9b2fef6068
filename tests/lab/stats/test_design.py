"""A design: what it needs, and its boundaries against published tables and a random walk."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import nct, norm
from scipy.stats import t as student

from sglang_indexcache.errors import QualityError
from sglang_indexcache.lab.stats.bounds import Estimate
from sglang_indexcache.lab.stats.design import (
    Design,
    boundaries,
    crossing_probability,
    needed_drift,
    spent,
    spread,
    spread_over_cells,
)
from sglang_indexcache.lab.stats.pairs import Differences, Flips


def test_the_classical_size_with_one_look() -> None:
    # n = 6.18 d / m^2 pairs, times the design effect over the questions of a context.
    design = Design(contexts=1, looks=1)
    deviation, _ = spread(0.1, 0.1, 8)
    classical = (norm.ppf(0.95) + norm.ppf(0.8)) ** 2 * 0.1 / 0.01**2 * 1.7 / 8
    assert design.needed(deviation, 1.0) == pytest.approx(classical, abs=2.5)
    four = Design(contexts=4, looks=4).needed(deviation, 1.0)
    assert four / classical == pytest.approx(1.029, abs=0.002)


@pytest.mark.parametrize("margin", [0.03, 0.05, 0.1])
def test_the_deviation_is_not_known_beforehand(margin: float) -> None:
    # Student's t by its exact power, where every context differs; there are enough for t.
    design, deviation = Design(contexts=1, looks=1, margin=margin), 0.3

    def power(contexts: int) -> float:
        freedom, drift = contexts - 1, margin * contexts**0.5 / deviation
        return float(nct.sf(student.ppf(0.95, freedom), freedom, drift))

    exact = next(contexts for contexts in range(2, 1000) if power(contexts) >= design.power)
    assert abs(design.needed(deviation, 1.0) - exact) <= 1


def test_looks_after_whole_rounds_do_not_err_more_often() -> None:
    for looks in (2, 3, 4, 6):
        design = Design(contexts=100, looks=looks)
        for rounds in range(looks, 40):
            later = [-(-rounds * look // looks) / rounds for look in range(1, looks + 1)]
            assert 0.047 < crossing_probability(later, design.bounds) <= 0.05 + 1e-6


def test_correlated_questions_count_for_fewer() -> None:
    assert spread(0.02, 0.0, 8)[0] == pytest.approx((0.02 / 8) ** 0.5)
    assert spread(0.02, 1.0, 8) == pytest.approx((0.02**0.5, 0.02))
    assert spread(0.0, 0.5, 8) == (0.0, 0.0)


def test_spread_against_drawn_contexts() -> None:
    draw = np.random.default_rng(1)
    contexts, discordance, correlation = 400_000, 0.06, 0.25
    tied = draw.random((contexts, 8)) < correlation**0.5
    chances = (discordance / 2, 1 - discordance, discordance / 2)
    alone = draw.choice((-1, 0, 1), (contexts, 8), p=chances)
    values = np.where(tied, draw.choice((-1, 0, 1), (contexts, 1), p=chances), alone).mean(axis=1)
    deviation, differing = spread(discordance, correlation, 8)
    assert values.std() == pytest.approx(deviation, rel=0.02)
    assert (values**2).mean() ** 2 / (values**4).mean() == pytest.approx(differing, rel=0.05)


def test_detectable_is_the_margin_that_needs_as_many_contexts() -> None:
    for deviation, differing in (spread(0.02, 0.1, 8), spread(0.1, 0.0, 8), (0.0, 0.0)):
        design = Design(contexts=576)
        margin = design.detectable(deviation, differing)
        again = Design(contexts=576, margin=margin).needed(deviation, differing)
        assert (
            again <= 576 < Design(contexts=576, margin=margin * 0.98).needed(deviation, differing)
        )


def test_single_questions_of_which_many_differ_show_a_large_loss() -> None:
    # Too few differ for t, and one loss would take the full stake: half of it wins.
    few, more = (Design(contexts=contexts).detectable(0.42**0.5, 0.42) for contexts in (60, 75))
    assert more < few < 0.45
    nothing = np.zeros(60, int)
    draw = np.random.default_rng(0)
    design, wins = Design(contexts=60), 0
    for _ in range(300):
        values = draw.choice((-1.0, 0.0, 1.0), 60, p=(0.21, 0.58, 0.21))
        found_now = Differences(values, nothing, (("t", 1),), Flips(0, 0, 60), nothing + 1)
        estimate = Estimate(found_now)
        wins += estimate.lower(design.bounds[-1]) > -few
    assert wins > 0.8 * 300  # at the last look alone, so by more than planned
    assert Design(contexts=12).detectable(0.9, 0.8) > 0.9


@pytest.mark.parametrize("sizes", [(128,), (400, 400, 40), (300, 20)])
def test_rows_of_a_file_show_what_their_plan_says(sizes: tuple[int, ...]) -> None:
    """Each context has one question, and one that is lost takes a full stake whole."""
    total = sum(sizes)
    margin = Design(total).detectable(*spread_over_cells([(n, 1) for n in sizes], 0.02, 0.1))
    cells = np.repeat(np.arange(len(sizes)), sizes)
    names, questions = tuple(("t", n) for n in range(len(sizes))), np.ones(total, int)
    bound, wins, draw = Design(total).bounds[-1], 0, np.random.default_rng(2)
    for _ in range(200):
        values = draw.choice((-1.0, 0.0, 1.0), total, p=(0.01, 0.98, 0.01))
        estimate = Estimate(Differences(values, cells, names, Flips(0, 0, total), questions))
        wins += estimate.lower(bound) > -margin
    assert wins > 0.6 * 200  # 80 % by plan: seven standard deviations off


def test_one_context_that_differs_hides_no_large_loss() -> None:
    design = Design(contexts=144)
    nothing, one_differs = design.detectable(0.0, 0.0), design.detectable(0.125 / 12, 1 / 144)
    assert nothing <= one_differs < 1.2 * nothing < 0.04


def test_where_nothing_differs_the_needed_contexts_suffice() -> None:
    design = Design(contexts=4, margin=0.01)
    for contexts, enough in ((design.needed(0.0, 0.0), True), (300, False)):
        nothing = np.zeros(contexts)
        cells, questions = nothing.astype(int), np.ones(contexts, int)
        nothing_differs = Differences(nothing, cells, (("t", 1),), Flips(0, 0, contexts), questions)
        assert (Estimate(nothing_differs).lower(design.bounds[-1]) > -0.01) == enough


@pytest.mark.parametrize(
    ("change", "message"),
    [({"margin": 0.0}, "margin"), ({"looks": 5}, "looks")],
)
def test_designs_that_nobody_can_follow_are_refused(change: dict[str, float], message: str) -> None:
    with pytest.raises(QualityError, match=message):
        Design(**{"contexts": 4, **change})


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
    power_there = (z + drift * np.sqrt(fractions) > bounds).any(axis=1).mean()
    assert wrong == pytest.approx(alpha, abs=6 * (alpha * (1 - alpha) / walks) ** 0.5)
    assert power_there == pytest.approx(power, abs=6 * (power * (1 - power) / walks) ** 0.5)
