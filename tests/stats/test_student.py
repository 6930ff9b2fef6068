"""Student's t against the tables of a textbook and against scipy's own test."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from sglang_indexcache.stats.student import crossed_half_width, half_width, student_quantile

TEXTBOOK = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306}


@pytest.mark.parametrize("freedom", TEXTBOOK)
def test_quantiles(freedom: int) -> None:
    assert student_quantile(0.975, freedom) == pytest.approx(TEXTBOOK[freedom], abs=5e-4)


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=20), st.sampled_from([0.9, 0.95]))
def test_the_interval_is_that_of_the_t_test(values: list[float], confidence: float) -> None:
    half = half_width(values, confidence)
    assert half is not None
    if half > 1e-9:
        low, high = stats.ttest_1samp(values, 0).confidence_interval(confidence)
        assert half == pytest.approx((high - low) / 2)


def test_one_value_has_no_interval() -> None:
    assert half_width([3.0]) is None
    assert half_width([]) is None


def test_runs_and_documents_both_widen_an_interval() -> None:
    alike = [[1.0, 2.0, 4.0]] * 3
    assert crossed_half_width(alike) == pytest.approx(half_width([1.0, 2.0, 4.0]))
    assert crossed_half_width(alike[:1]) == pytest.approx(half_width([1.0, 2.0, 4.0]))
    runs = [[x] * 3 for x in (1.0, 2.0, 4.0)]
    assert crossed_half_width(runs) == pytest.approx(half_width([1.0, 2.0, 4.0]))
    # Variances of means 7/9 each; Welch and Satterthwaite: (2v)^2 / (2 v^2 / 2) = 4.
    both = [[a + b for b in (1.0, 2.0, 4.0)] for a in (1.0, 2.0, 4.0)]
    assert crossed_half_width(both) == pytest.approx(TEXTBOOK[4] * (14 / 9) ** 0.5, abs=1e-3)
    assert crossed_half_width([[1.0]]) is None
    assert crossed_half_width([[1.0, 1.0], [1.0, 1.0]]) == 0.0


def test_the_interval_of_runs_and_documents_covers_as_often_as_it_says() -> None:
    draw = np.random.default_rng(0)
    for run_share, document_share in ((1.0, 0.3), (0.3, 1.0), (1.0, 1.0)):
        hits = 0
        for _ in range(400):
            table = (
                run_share * draw.normal(size=(3, 1))
                + document_share * draw.normal(size=(1, 24))
                + draw.normal(size=(3, 24))
            )
            half = crossed_half_width(table.tolist())
            assert half is not None
            hits += abs(table.mean()) <= half
        assert hits / 400 >= 0.92
