"""Bounds against scipy, against enumeration, and where nothing or little differs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from scipy.stats import norm, ttest_1samp

from sglang_indexcache.lab.stats.bounds import (
    Estimate,
    capital,
    half_width,
    unseen,
)
from sglang_indexcache.lab.stats.design import Design
from sglang_indexcache.lab.stats.pairs import Differences, Flips

Z = float(norm.ppf(0.95))


def differences(
    values: list[float], cells: list[int] | None = None, questions: list[int] | None = None
) -> Differences:
    cells, questions = cells or [0] * len(values), questions or [8] * len(values)
    names = tuple((f"t{cell}", 1) for cell in sorted(set(cells)))
    flips = Flips(0, 0, len(values))
    return Differences(np.array(values, float), np.array(cells), names, flips, np.array(questions))


def test_symmetric_values_in_one_cell_have_students_interval() -> None:
    values = [0.5] * 20 + [-0.5] * 20  # no skewness to correct, and all contexts differ alike
    estimate = Estimate(differences(values))
    expected = ttest_1samp(values, 0).confidence_interval(0.9)
    assert (estimate.lower(Z), estimate.upper(Z)) == pytest.approx(tuple(expected))


def test_cells_count_the_same_and_only_vary_within() -> None:
    rare, often = [0.2, 0.4], [-0.1, 0.0, 0.1, 0.2] * 5
    estimate = Estimate(differences(rare + often, [0] * 2 + [1] * 20))
    assert estimate.mean == pytest.approx((np.mean(rare) + np.mean(often)) / 2)
    parts = [np.var(part, ddof=1) / len(part) for part in (rare, often)]
    assert estimate.error == pytest.approx(np.sqrt(sum(parts)) / 2)


def test_skewness_moves_the_bounds_towards_the_rare_losses() -> None:
    values = [0.0] * 400 + [-1 / 8] * 30
    estimate = Estimate(differences(values))
    assert not estimate.exact
    below, above = estimate.mean - estimate.lower(Z), estimate.upper(Z) - estimate.mean
    assert below > 1.1 * above > 0


def test_hall_transformation_is_inverted() -> None:
    values = np.array([0.0] * 300 + [-1 / 8] * 40)
    estimate = Estimate(differences(list(values)))
    count, error = len(values), estimate.error
    skew = ((values - values.mean()) ** 3).sum() / count**3 / error**3
    t = (estimate.mean - estimate.lower(Z)) / error
    moved = t + skew * t**2 / 3 + skew**2 * t**3 / 27 + skew / 6
    from scipy.stats import t as student

    assert moved == pytest.approx(student.ppf(0.95, 40 - 1))  # those that differ


def test_nothing_differs_is_the_binomial_bound_but_for_the_two_stakes() -> None:
    contexts = 500
    estimate = Estimate(differences([0.0] * contexts))
    assert estimate.error == 0
    assert estimate.exact
    loss = -estimate.lower(Z)
    binomial = 1 - 0.05 ** (1 / contexts)  # "3/n", with contexts for n
    assert binomial < loss < 1 - 0.025 ** (1 / contexts)
    assert estimate.upper(Z) == pytest.approx(loss)


@pytest.mark.parametrize("null", [-0.3, -0.05, 0.0])
def test_the_bet_is_won_too_often_by_no_distribution(null: float) -> None:
    # Every distribution of three contexts over a grid with the mean of the null, enumerated.
    support, alpha = (-1.0, -0.25, 0.0, 1.0), 0.2
    for low, middle in itertools.product(np.linspace(0, 1, 9), repeat=2):
        # P(-1), P(-1/4) given; the rest so that the mean is the null.
        gain = null + low + middle / 4
        rest = 1 - low - middle - gain
        if gain < 0 or rest < 0:
            continue
        chances = dict(zip(support, (low, middle, rest, gain), strict=True))
        won = sum(
            np.prod([chances[value] for value in values])
            for values in itertools.product(support, repeat=3)
            if capital(np.array(values), 1.0, null) >= 1 / alpha
        )
        assert won <= alpha + 1e-12


def test_few_that_differ_are_bounded_by_the_bet_and_many_are_not() -> None:
    assert Estimate(differences([0.0] * 100 + [-1 / 8] * 15)).exact
    assert not Estimate(differences([0.0] * 100 + [-1 / 8] * 40)).exact
    # One context that lost everything outweighs forty: the error rests on it alone.
    assert Estimate(differences([0.0] * 100 + [-1 / 8] * 40 + [-1.0])).exact


def test_a_small_cell_that_lost_nothing_is_not_hidden_by_what_others_differ() -> None:
    many, few = [0.0] * 226 + [-1 / 8, 1 / 8] * 15, [0.0] * 8
    alone = Estimate(differences(many))
    together = Estimate(differences(many + few, [0] * 256 + [1] * 8, [8] * 256 + [1] * 8))
    assert alone.differing == pytest.approx(30)
    assert not alone.exact
    assert together.exact
    # Rows of which none was lost say no more than the rule of three does, whatever is beside them.
    assert together.lower(Z) < (0.05 ** (1 / 8) - 1) / 2
    alike = Estimate(differences(many * 2, [0] * 256 + [1] * 256))
    assert alike.differing == pytest.approx(60)


def test_finer_scores_count_by_what_they_differ_by() -> None:
    values = [0.0] * 100 + [-0.02, 0.02] * 40
    assert Estimate(differences(values, questions=[1] * 180)).differing == pytest.approx(80)


def test_a_cell_of_one_context_has_no_error_and_is_left_to_the_bet() -> None:
    single = Estimate(differences([0.5, -0.5] * 20 + [0.5], [0] * 40 + [1]))
    assert single.error == np.inf
    assert single._half(Z) == np.inf
    assert single.exact


def test_whole_contexts_that_may_be_lost_unseen_bound_every_method() -> None:
    """Forty contexts that flip a little unlock t; a hundred contexts cannot show one point."""
    values = [0.0] * 60 + [-1 / 8, 1 / 8] * 20
    estimate = Estimate(differences(values))
    assert not estimate.exact
    assert estimate.lower(Z) > -0.02
    # Exactly the loss with which no context of a hundred is lost in one run of twenty.
    assert estimate.guarded(Z) == pytest.approx(0.05 ** (1 / 100) - 1)
    assert estimate.guarded(Z) < -0.029
    nothing = Estimate(differences([0.0] * 500))
    assert nothing.guarded(Z) == nothing.lower(Z)  # the bet is farther away


@pytest.mark.parametrize("sizes", [(300, 300), (20, 400), (5, 50, 500)])
def test_no_way_to_lose_whole_contexts_is_seen_less_often(sizes: tuple[int, ...]) -> None:
    """Against the best that a loss can do: water-filling over cells of these sizes."""
    heaviest = sum(sizes) / len(sizes) / min(sizes)
    loss = unseen(sum(sizes), 0.05, heaviest)
    most = 0.0
    for level in np.linspace(0, max(sizes) * 2, 4000)[1:]:
        lost = [max(0.0, 1 - size / level) for size in sizes]
        if sum(lost) / len(sizes) >= loss:
            most = float(np.prod([(1 - p) ** size for p, size in zip(lost, sizes, strict=True)]))
            break
    assert most <= 0.05 + 1e-6


def test_a_plan_promises_no_margin_that_a_rare_loss_could_hide_in() -> None:
    design = Design(contexts=192, margin=0.01)
    assert design.needed(0.02, 0.3) >= np.log(0.0427) / np.log(0.99)
    assert design.detectable(0.02, 0.3) >= unseen(192, 0.0427) - 1e-3


def test_a_cells_mean_is_that_of_its_questions() -> None:
    """A harness prints it so: four single questions do not outweigh one context of sixteen."""
    values, questions = [-0.25, 0.5, 0.0, 1.0], [16, 4, 2, 1]
    estimate = Estimate(differences(values, [0] * 4, questions))
    repeated = np.repeat(values, questions)
    assert estimate.mean == pytest.approx(repeated.mean())
    # The linearised ratio estimator, Cochran (1977), section 6.4, without the finite correction.
    size = np.array(questions)
    residuals = size * (np.array(values) - repeated.mean()) / size.mean()
    assert estimate.error == pytest.approx(residuals.std(ddof=1) / 2)
    two_cells = Estimate(differences([*values, 0.2], [0] * 4 + [1], [*questions, 3]))
    assert two_cells.mean == pytest.approx((repeated.mean() + 0.2) / 2)


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=20), st.sampled_from([0.9, 0.95]))
def test_the_interval_is_that_of_the_t_test(values: list[float], confidence: float) -> None:
    half = half_width(values, confidence)
    assert half is not None
    if half > 1e-9:
        low, high = stats.ttest_1samp(values, 0).confidence_interval(confidence)
        assert half == pytest.approx((high - low) / 2)


def test_the_interval_of_skewed_losses_covers() -> None:
    """Student's covers 79 % of these: a few documents carry most of the loss."""
    values = np.exp(1.5 * np.random.default_rng(0).standard_normal((4000, 32)))
    low, high = Estimate.of(values).interval(0.95)
    truth = np.exp(1.125)
    assert ((low <= truth) & (truth <= high)).mean() > 0.93
    assert (high < truth).mean() > (low > truth).mean()


def test_the_interval_of_like_values_is_students() -> None:
    values = 5 + 0.01 * np.random.default_rng(1).standard_normal(24)
    low, high = Estimate.of(values).interval(0.95)
    half = half_width(values)
    assert (low, high) == pytest.approx((values.mean() - half, values.mean() + half), abs=2e-4)
    mirrored = Estimate.of(-values).interval(0.95)
    assert mirrored == pytest.approx((-high, -low))
    assert Estimate.of(np.full(4, 0.3)).interval() == pytest.approx((0.3, 0.3))


def test_one_value_has_no_interval() -> None:
    assert half_width([3.0]) is None
    assert half_width([]) is None
