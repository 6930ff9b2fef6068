"""No figure that its own spread does not support: the rule, for every spread there can be."""

from __future__ import annotations

import statistics
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from sglang_indexcache.demo.run import ROUNDS as LEAST
from sglang_indexcache.demo.run import UNSHOWN, times_faster

SECONDS = st.floats(1e-3, 1e3)
ROUNDS = st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=12)


def speedup(rounds: list[tuple[float, float]]) -> str:
    return times_faster([base for base, _ in rounds], [other for _, other in rounds])


def of_ratios(*ratios: float) -> str:
    return speedup([(ratio, 1.0) for ratio in ratios])


@given(ROUNDS)
def test_a_difference_is_shown_only_if_every_round_shows_it(
    rounds: list[tuple[float, float]],
) -> None:
    ratios = [base / other for base, other in rounds]
    one_side = max(ratios) < 1 or min(ratios) > 1
    assert (UNSHOWN in speedup(rounds)) == (len(rounds) < LEAST or not one_side)


@given(ROUNDS)
def test_the_median_comes_with_its_range_if_shown(rounds: list[tuple[float, float]]) -> None:
    found, ratios = speedup(rounds), [base / other for base, other in rounds]
    median = f"{statistics.median(ratios):.2f}x ("
    assert found.startswith(median) == (UNSHOWN not in found)
    assert f"({min(ratios):.2f}x to {max(ratios):.2f}x)" in found
    assert speedup(rounds[::-1]) == found


@given(ROUNDS)
def test_nobody_is_favoured(rounds: list[tuple[float, float]]) -> None:
    swapped = speedup([(other, base) for base, other in rounds])
    assert (UNSHOWN in speedup(rounds)) == (UNSHOWN in swapped)


def test_servers_of_equal_speed_are_told_apart_as_rarely_as_stated() -> None:
    """Each round of equal servers is a coin: of all that six coins can show, 2 in 64 mislead."""
    tosses = [of_ratios(*ratios) for ratios in product((0.9, 1.1), repeat=LEAST)]
    assert sum(UNSHOWN not in toss for toss in tosses) / len(tosses) == 1 / 32


def test_in_words() -> None:
    assert of_ratios(2.5, 2.4, 2.6, 2.5, 2.5, 2.7) == "2.50x (2.40x to 2.70x)"
    assert of_ratios(0.8, 0.8, 0.9, 0.8, 0.8, 0.8) == "0.80x (0.80x to 0.90x)"
    assert of_ratios(2.5, 2.4, 6.8, 2.5, 2.5, 2.7) == "2.50x (2.40x to 6.80x)"
    assert of_ratios(1.2, 1.1, 0.9, 1.2, 1.2, 1.2) == "no difference shown (0.90x to 1.20x)"
    assert of_ratios(2.5, 2.5, 2.5) == "no difference shown (2.50x to 2.50x)"
    # What one shot on each of three machines gave.
    assert UNSHOWN in of_ratios(2.6, 2.9, 6.8)
