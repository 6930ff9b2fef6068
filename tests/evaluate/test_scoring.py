"""What is made of the log-probabilities that a server answers with."""

from __future__ import annotations

import math

import pytest

from sglang_indexcache.evaluate.evaluation import Answer


def answer(*logprobs: float) -> Answer:
    return Answer("arm", 0, "c", "q0", "needles", 4096, 0.5, 1.0, tokens=2, logprobs=logprobs)


def test_an_answer_is_the_mean_over_its_tokens() -> None:
    assert answer(-0.1, -2.2).nll == pytest.approx(1.15)
    assert answer(-0.1, -2.2).probability == pytest.approx(math.exp(-2.3))
    assert (answer().nll, answer().probability) == (None, None)


def test_a_probability_is_none_above_one() -> None:
    """Rounding may put a log-probability a little above zero."""
    assert answer(5e-7, 0.0).probability == 1.0
