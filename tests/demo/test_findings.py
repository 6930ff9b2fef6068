"""No figure that its own spread does not support: the rule, for every spread there can be."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from sglang_indexcache.demo.findings import (
    MIN_ROUNDS,
    UNSHOWN,
    WIDEST,
    DemoSpeedup,
    PairedAnswers,
    Spread,
)

SECONDS = st.floats(1e-3, 1e3)
ROUNDS = st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=12)
PAIRS = st.lists(st.tuples(st.booleans(), st.booleans()), max_size=60)


def speedup(rounds: list[tuple[float, float]]) -> DemoSpeedup:
    return DemoSpeedup.of([base for base, _ in rounds], [other for _, other in rounds])


def of_ratios(*ratios: float) -> DemoSpeedup:
    return speedup([(ratio, 1.0) for ratio in ratios])


@given(ROUNDS)
def test_a_difference_is_shown_only_if_every_round_shows_it(
    rounds: list[tuple[float, float]],
) -> None:
    found = speedup(rounds)
    faster = [base > other for base, other in rounds]
    slower = [base < other for base, other in rounds]
    if found.is_shown:
        assert len(rounds) >= MIN_ROUNDS
        assert all(faster) or all(slower)
    elif len(rounds) >= MIN_ROUNDS:
        assert found.ratios.low <= 1 <= found.ratios.high
    assert (UNSHOWN in str(found)) == (not found.is_shown)


@given(ROUNDS)
def test_one_number_is_printed_only_if_shown_and_steady(rounds: list[tuple[float, float]]) -> None:
    found = speedup(rounds)
    has_number = str(found).startswith(f"{found.ratios.median:.2f}x (")
    assert has_number == (found.is_shown and found.is_steady)
    assert f"{found.ratios.low:.2f}x to {found.ratios.high:.2f}x" in str(found)
    if found.is_steady:
        assert found.ratios.high <= WIDEST * found.ratios.low


@given(ROUNDS, SECONDS)
def test_neither_the_order_of_the_rounds_nor_a_unit_matters(
    rounds: list[tuple[float, float]], unit: float
) -> None:
    ratios, again = speedup(rounds).ratios, speedup(rounds[::-1]).ratios
    assert ratios == again
    scaled = speedup([(unit * base, unit * other) for base, other in rounds]).ratios
    assert scaled.median == pytest.approx(ratios.median)


@given(ROUNDS)
def test_nobody_is_favoured(rounds: list[tuple[float, float]]) -> None:
    found = speedup(rounds)
    swapped = speedup([(other, base) for base, other in rounds])
    assert found.is_shown == swapped.is_shown
    assert swapped.ratios.low == pytest.approx(1 / found.ratios.high)


def test_servers_of_equal_speed_are_told_apart_as_rarely_as_stated() -> None:
    """Each round of equal servers is a coin: of all that six coins can show, 2 in 64 mislead."""
    tosses = [of_ratios(*ratios) for ratios in product((0.9, 1.1), repeat=MIN_ROUNDS)]
    assert sum(toss.is_shown for toss in tosses) / len(tosses) == 1 / 32


def test_in_words() -> None:
    assert str(of_ratios(2.5, 2.4, 2.6, 2.5, 2.5, 2.7)) == "2.50x (2.40x to 2.70x)"
    assert str(of_ratios(0.8, 0.8, 0.9, 0.8, 0.8, 0.8)) == "0.80x (0.80x to 0.90x)"
    assert str(of_ratios(2.5, 2.4, 6.8, 2.5, 2.5, 2.7)) == (
        "2.40x to 6.80x, too unsteady for one number"
    )
    assert str(of_ratios(1.2, 1.1, 0.9, 1.2, 1.2, 1.2)) == "no difference shown (0.90x to 1.20x)"
    assert str(of_ratios(2.5, 2.5, 2.5)) == "no difference shown (2.50x to 2.50x)"


def test_what_one_shot_on_each_of_three_machines_gave_is_no_figure() -> None:
    assert not of_ratios(2.6, 2.9, 6.8).is_shown


@given(st.lists(SECONDS, min_size=1))
def test_a_spread_is_in_order(values: list[float]) -> None:
    spread = Spread.of(values)
    assert spread.low <= spread.median <= spread.high
    assert {spread.low, spread.high} <= set(values)


@given(PAIRS)
def test_paired_answers_are_all_counted(pairs: list[tuple[bool, bool]]) -> None:
    found = PairedAnswers.of([base for base, _ in pairs], [other for _, other in pairs])
    assert found.both + found.only_base == sum(base for base, _ in pairs)
    assert found.both + found.only_other == sum(other for _, other in pairs)
    assert found.both + found.only_base + found.only_other + found.neither == len(pairs)


@given(st.integers(0, 40), st.integers(0, 40))
def test_chance_is_that_of_the_exact_sign_test(only_base: int, only_other: int) -> None:
    found = PairedAnswers(3, only_base, only_other, 5)
    differ = only_base + only_other
    expected = binomtest(only_base, differ).pvalue if differ else 1.0
    assert found.chance == pytest.approx(expected)
    assert found.is_shown == (expected < 0.05)
