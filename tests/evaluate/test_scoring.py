"""What is made of the log-probabilities that a server answers with."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import rel_entr

from sglang_indexcache.ask.score import Top
from sglang_indexcache.evaluate.evaluation import TOP, Answer, divergence
from sglang_indexcache.evaluate.scoring import _kept


def top(probabilities: np.ndarray, count: int) -> Top:
    order = np.argsort(-probabilities)[:count]
    return [(int(i), float(np.log(probabilities[i]))) for i in order]


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.floats(0.1, 5.0))
def test_divergence_is_a_lower_bound_of_the_whole(seed: int, width: float) -> None:
    """And the very thing where the likeliest tokens are all tokens."""
    draw = np.random.default_rng(seed)
    first, second = (np.exp(row) / np.exp(row).sum() for row in draw.normal(0, width, (2, 40)))
    whole = rel_entr(first, second).sum()
    assert divergence(top(first, 40), top(second, 40)) == pytest.approx(whole, abs=1e-6)
    assert -1e-9 <= divergence(top(first, 20), top(second, 20)) <= whole + 1e-6


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.floats(0.1, 12.0))
def test_the_bound_holds_where_unlikely_tokens_are_not_kept(seed: int, width: float) -> None:
    draw = np.random.default_rng(seed)
    first, second = (np.exp(row) / np.exp(row).sum() for row in draw.normal(0, width, (2, 40)))
    kept = [_kept(top(probabilities, TOP)) for probabilities in (first, second)]
    assert 0 <= divergence(*kept) <= rel_entr(first, second).sum() + 1e-4


def test_nothing_in_common_is_far_apart_and_the_same_is_zero() -> None:
    one = [(1, np.log(0.9)), (2, np.log(0.05))]
    # What the other one does not name has less than 1e-4 there.
    far = 0.95 * np.log(0.95 / 2e-4) + 0.05 * np.log(0.05 / (1 - 2e-4))
    assert divergence(one, [(3, np.log(0.9))]) == pytest.approx(far)
    assert divergence(one, one) == 0


def test_an_answer_is_the_mean_over_its_tokens() -> None:
    place = ("c", "q0", "needles", 4096, 0.5)
    reference = Answer(
        *("full", 0, *place),
        right=True,
        tokens=2,
        logprobs=(-0.1, -0.2),
        tops=([(1, -0.1)], [(2, -0.2)]),
    )
    own = Answer(
        *("arm", 0, *place),
        right=False,
        tokens=2,
        logprobs=(-0.1, -2.2),
        tops=([(1, -0.1)], [(3, -0.3), (2, -2.2)]),
    )
    found = own.beside(reference)
    assert found.nll == pytest.approx(1.15)
    assert found.agreement == 0.5
    expected = [0.0, divergence([(2, -0.2)], [(3, -0.3), (2, -2.2)])]
    assert found.kl == pytest.approx(np.mean(expected))
    alone = reference.beside(None)
    assert (alone.kl, alone.agreement) == (None, None)
