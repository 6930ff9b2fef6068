"""Promises of both endpoints, held to the committed study, which loses what it says."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks import quality_endpoints as study
from benchmarks.quality_statistics import HeldBack
from benchmarks.records import RESULTS

FOUND = json.loads((RESULTS / f"{study.NAME}.json").read_text())


def test_wrong_claims_stay_within_the_promise() -> None:
    """One of 48 places has 5.9 % of 4,000 runs wrong by chance one time in a hundred, at 5 %."""
    for row in FOUND["rows"]:
        for kind in study.KINDS:
            assert row[kind]["wrong"] < 0.065
            assert row[kind]["loss"] < 0.065


def test_probabilities_show_as_much_with_fewer_contexts() -> None:
    for answers, sure in zip(FOUND["rows"][::2], FOUND["rows"][1::2], strict=True):
        kind = study.KINDS[0]
        assert sure[kind]["used"] < 0.85 * answers[kind]["used"]
        assert sure[kind]["no_loss"] > answers[kind]["no_loss"] - 0.02


@pytest.mark.parametrize("endpoint", ["answers", "probability"])
@pytest.mark.parametrize("kind", study.KINDS)
def test_a_loss_of_the_margin_is_one(endpoint: str, kind: str) -> None:
    levels = np.linspace(0.6, 1.0, 50)
    contexts = study.Contexts(np.zeros(50), levels, endpoint, 0.0, kind)
    world = HeldBack((500,) * 4, 0.03, contexts)
    values = contexts(np.random.default_rng(1), world, 50, 1.0)
    assert values.mean() == pytest.approx(-0.03, abs=0.002)
