"""The study of what stands in front of the bounds: what it found, and its oracle."""

from __future__ import annotations

import json

import pytest

from benchmarks import quality_gates as study
from benchmarks.records import RESULTS
from sglang_indexcache.lab.evaluate.plan import ENDPOINTS, SEEING
from sglang_indexcache.lab.evaluate.verdict import SAME

FOUND = json.loads((RESULTS / f"{study.NAME}.json").read_text())


def test_sound_runs_pass_the_control_whatever_the_engine_flips() -> None:
    sound = [row for row in FOUND["control"] if not row["fault"]]
    assert max(row["refused"] for row in sound) <= SAME
    [usual] = [row for row in sound if row["flips"] == study.ENGINE]
    agreement = 1 - 2 * study.ENGINE * (1 - study.ENGINE)
    assert usual["refused_by_one_difference"] == pytest.approx(1 - agreement**96, abs=0.02)
    worst = max(FOUND["control"], key=lambda row: row["fault"])
    assert worst["refused"] > 0.99


def test_what_is_missing_hides_no_loss() -> None:
    for row in FOUND["missing"]:
        assert row["no_loss"]["counted_as_lost"] <= 0.05
    assert FOUND["missing"][0]["no_loss"]["left_out"] > 0.5


def test_probabilities_let_more_cells_see_the_bad_pattern() -> None:
    right, probable, *plans = FOUND["bad_pattern"]
    assert right["cells"] < 10
    assert probable["cells"] > 14
    assert probable["no_loss"] > 2 * right["no_loss"]
    assert [row["endpoint"] for row in plans] == list(ENDPOINTS)
    for row in plans:  # what a plan counts on, and what it promises
        assert row["cells"] / row["of_cells"] >= SEEING[row["endpoint"]] - 0.01
        assert row["no_loss"] >= 0.8


def test_a_small_run_agrees_with_the_committed_one() -> None:
    row = study.missing(1.0, 60, 7)
    assert row["no_loss"]["counted_as_lost"] <= 0.05
    assert abs(row["no_loss"]["left_out"] - FOUND["missing"][0]["no_loss"]["left_out"]) < 0.25
    again = study.control(0.02, 0.0, 500, 3)
    assert again["refused"] <= 0.02
