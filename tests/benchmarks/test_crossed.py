"""The interval of a mean over runs and documents, against cases by hand and against draws."""

import numpy as np
import pytest

from benchmarks.crossed import crossed_half_width
from sglang_indexcache.stats.bounds import half_width


def test_runs_and_documents_both_widen_an_interval() -> None:
    alike = [[1.0, 2.0, 4.0]] * 3
    assert crossed_half_width(alike) == pytest.approx(half_width([1.0, 2.0, 4.0]))
    assert crossed_half_width(alike[:1]) == pytest.approx(half_width([1.0, 2.0, 4.0]))
    runs = [[x] * 3 for x in (1.0, 2.0, 4.0)]
    assert crossed_half_width(runs) == pytest.approx(half_width([1.0, 2.0, 4.0]))
    # Variances of means 7/9 each; Welch and Satterthwaite: (2v)^2 / (2 v^2 / 2) = 4.
    both = [[a + b for b in (1.0, 2.0, 4.0)] for a in (1.0, 2.0, 4.0)]
    assert crossed_half_width(both) == pytest.approx(2.776 * (14 / 9) ** 0.5, abs=1e-3)
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
