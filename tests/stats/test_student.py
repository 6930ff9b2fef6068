"""Student's t against the tables of a textbook and against scipy's own test."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from sglang_indexcache.stats.student import half_width, student_quantile

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
