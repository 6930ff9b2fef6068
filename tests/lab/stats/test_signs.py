"""The sign-flip test, against every choice of signs and against its promise."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_indexcache.lab.stats.bounds import LEVELS, sign_flip
from sglang_indexcache.lab.stats.design import Design


@given(st.lists(st.integers(-LEVELS, LEVELS), min_size=1, max_size=10))
def test_it_counts_every_choice_of_signs(steps: list[int]) -> None:
    """Differences are whole steps of the largest here, so that none is rounded."""
    values = np.array([*steps, LEVELS], dtype=float) / LEVELS
    sums = [
        sum(sign * abs(value) for sign, value in zip(signs, values, strict=True))
        for signs in product((-1, 1), repeat=len(values))
    ]
    expected = np.mean([total <= values.sum() + 1e-9 for total in sums])
    assert sign_flip(values) == pytest.approx(expected, abs=1e-12)
    assert sign_flip(7.3 * values) == pytest.approx(expected, abs=1e-12)


def test_nothing_that_differs_shows_nothing() -> None:
    assert sign_flip(np.zeros((3, 5))).tolist() == [1, 1, 1]


def test_24_contexts_lost_and_5_won_are_a_loss() -> None:
    """A run at 8,192 tokens was called undecided: 24 of 48 contexts lost and 5 won."""
    values = np.zeros(48)
    values[:24], values[24:29] = -0.2, 0.2
    probability = float(sign_flip(values))
    assert probability == pytest.approx(0.00027, abs=0.00001)  # of 29, 5 or fewer
    assert probability < Design(48, looks=4, margin=0.1).errors[-1]


def test_looks_together_spend_alpha() -> None:
    for looks in (1, 2, 4):
        errors = Design(48, looks=looks).errors
        assert sum(errors) == pytest.approx(0.05)
        assert min(errors) > 0
        assert sorted(errors) == list(errors)


@pytest.mark.parametrize("heavy", [False, True])
def test_a_pattern_that_loses_nothing_is_said_to_lose_in_no_more_runs_than_promised(
    heavy: bool,
) -> None:
    """At four looks, by 4,000 runs with a fixed seed; of a loss that is there most are seen."""
    draw, design, runs = np.random.default_rng(5), Design(48, looks=4), 4000
    sizes = draw.exponential(1.0, (runs, 48)) ** (3 if heavy else 1)
    sizes *= draw.random((runs, 48)) < 0.4
    claimed, losing = np.zeros((2, runs), dtype=bool)
    for lost, shares in ((claimed, [0.5, 0.5]), (losing, [0.85, 0.15])):
        values = sizes * draw.choice([-1, 1], (runs, 48), p=shares)
        for look, error in enumerate(design.errors, 1):
            lost |= sign_flip(values[:, : 12 * look]) <= error
    assert claimed.mean() < 0.05
    assert losing.mean() > (0.35 if heavy else 0.7)
