"""The study of shared documents: its files are what they are called, and what it found."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks import quality_documents as study
from benchmarks.records import RESULTS

FOUND = json.loads((RESULTS / f"{study.NAME}.json").read_text())


def test_what_is_recognised_makes_no_claim_wrong_and_what_is_not_does() -> None:
    for row in FOUND["rows"]:
        wrong = {when: row[when]["no_loss_at_margin"] for when in ("before", "now")}
        if row["kind"] == study.KINDS[2]:
            assert abs(wrong["now"] - wrong["before"]) < 0.1
        else:
            assert wrong["now"] <= 0.05
        # Documents of which none is lost make every claim wrong that few others contradict.
        assert wrong["before"] <= 1.1 * 0.99 ** row["documents"] + 0.05
        assert (wrong["before"] > 0.1) == (row["shared_by"] >= 4)


@pytest.mark.parametrize(("kind", "least"), [(study.KINDS[0], 1.0), (study.KINDS[2], 0.3)])
def test_as_much_is_shared_as_is_said(kind: str, least: float) -> None:
    first, second, third = (text.split() for text in study.contexts(kind, 2, 3, seed=0))
    shared = study.words_of(kind, 2) if kind == study.KINDS[0] else study.THIRD
    assert longest_run(first, second) == shared
    assert longest_run(first, third) < shared / 4
    assert shared >= least * study.words_of(kind, 2)


def longest_run(first: list[str], second: list[str]) -> int:
    """Return the words of the longest stretch that both have, by brute force."""
    best, before = 0, [0] * (len(second) + 1)
    for word in first:
        now = [0] * (len(second) + 1)
        for place, second_word in enumerate(second, 1):
            now[place] = before[place - 1] + 1 if word == second_word else 0
        best, before = max(best, *now), now
    return best


def test_the_simulated_loss_is_that_of_documents() -> None:
    """Forty contexts each of ten documents: no document is lost in 0.99^10 of evaluations."""
    alone = study.claims(np.arange(400), 400, seed=1)
    tied = study.claims(np.arange(400) // 40, 400, seed=1)
    assert alone["no_loss_at_margin"] <= 0.05
    assert tied["no_loss_at_margin"] > 0.7 * 0.99**10
