"""The study of measures: what it asks, reads of a reply, and makes of the differences."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from scipy.stats import spearmanr, ttest_1samp

from benchmarks.quality_measures import (
    FEW,
    FULL,
    LENGTHS,
    NAME,
    RIGHT,
    Document,
    Table,
    agreement,
    document,
    foretold,
    measured,
    needed,
    patterns,
    spearman,
)
from benchmarks.records import RESULTS
from sglang_indexcache.ask.score import TokenScores
from sglang_indexcache.evaluate.tasks.context import Context, Question


def test_the_patterns_are_different_and_harm_by_their_retention_too() -> None:
    found = patterns()
    assert len(set(found.values())) == len(found) == 17
    assert {len(pattern.full_layers) for pattern in found.values()} == {12, 8, 6, 4, 3}


def test_a_document_is_the_context_with_every_question_and_answer() -> None:
    questions = [Question(f"q{n}", [10 + n], [20 + n, 30 + n], "", "", 0.0) for n in range(2)]
    made = document(Context("notes-8-0", "notes", 8, [1, 2, 3], questions))
    assert made == Document("notes-8-0", 8, [1, 2, 3, 10, 20, 30, 11, 21, 31], [4, 5, 7, 8])


def test_what_is_read_of_a_reply() -> None:
    asked = Document("notes-8-0", 8, [5, 6, 7, 8], [2, 3])
    tops = [[(9, -1.0)], [(7, -0.5)], [(9, -0.25)]]
    found = measured(TokenScores([-3.0, -0.5, -2.0], tops, 4), asked, topk=1)
    assert found == {"right": [1, 0], "answers": [0.5, 2.0], "tokens": pytest.approx(5.5 / 3)}


def made(documents: int, losses: list[float]) -> list[dict[str, Any]]:
    """Documents in which pattern n loses ``losses[n]`` by each measure, with unequal noise."""
    draw = np.random.default_rng(3)
    lines = []
    for number in range(documents):
        arms = {FULL: {"right": [1] * 100, "answers": [1.0], "tokens": 4.0}}
        for place, loss in enumerate(losses):
            right = (draw.random(100) >= loss).astype(int).tolist()
            nats = [1.0 + loss + 0.01 * draw.normal()]
            arms[f"p{place}"] = {
                "right": right, "answers": nats, "tokens": 4 + loss + draw.normal(),
            }  # fmt: skip
        lines.append({"document": number, "length": LENGTHS[number % 3], "arms": arms})
    return lines


def test_the_statistics_against_scipy() -> None:
    table = Table.of(made(60, [0.0, 0.1, 0.3, 0.6]))
    errors = table.deviation("answers") / 60**0.5
    for place, values in enumerate(table.values["answers"]):
        # within lengths: without what the three lengths differ by
        alone = values - np.array([values[table.lengths == n].mean() for n in table.lengths])
        t = ttest_1samp(alone + values.mean(), 0.0).statistic
        assert values.mean() / errors[place] == pytest.approx(t, rel=0.03)
    found = agreement(table, RIGHT, "answers")
    one, two = (table.values[name].mean(axis=1) for name in (RIGHT, "answers"))
    assert found["rho"] == pytest.approx(spearmanr(one, two).statistic)
    assert found["low"] <= found["rho"] <= found["high"]
    few = [foretold(table, name, 6, draws=100)["rho"] for name in ("answers", "tokens")]
    assert few[0] > few[1] + 0.1


def test_documents_needed_is_the_classical_size_and_unknown_for_what_was_not_seen() -> None:
    assert needed(0.5, 1.0, 100) == 25  # (1.645 + 0.842)^2 / 0.25 = 24.7
    assert needed(0.1, 1.0, 100) is None
    assert needed(-0.5, 1.0, 100) is None


def test_the_committed_study_is_whole() -> None:
    study = json.loads((RESULTS / f"{NAME}.json").read_text())
    assert {row["name"]: row["pattern"] for row in study["patterns"]} == {
        name: str(pattern) for name, pattern in patterns().items() if name != FULL
    }
    assert study["documents"] == 144
    assert set(study["foretold"]) == set(map(str, FEW))
    assert (RESULTS / f"{NAME}.png").exists()


def test_the_rank_correlation_is_scipys() -> None:
    draw = np.random.default_rng(3)
    for _ in range(30):
        first, second = draw.integers(-2, 3, (2, 12)).astype(float)  # with ties
        assert spearman(first, second) == pytest.approx(spearmanr(first, second).statistic)
    assert np.isnan(spearman(np.ones(4), np.arange(4.0)))
