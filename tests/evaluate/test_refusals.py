"""When an evaluation must not go on: noise of the engine that no plan resolves, and no floor."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from sglang_indexcache.errors import QualityError
from sglang_indexcache.evaluate.evaluation import Evaluation
from sglang_indexcache.evaluate.plan import CORRELATION, DISCORDANCE
from sglang_indexcache.evaluate.run import check_floor, check_noise
from sglang_indexcache.stats.power import Design, spread
from tests.evaluate.evaluations import LENGTHS, TASKS, evaluation

CELLS = len(TASKS) * len(LENGTHS)


def restless(flips: float, contexts: int, margin: float) -> Evaluation:
    """The reference gives another answer so often when it is asked again."""
    record, draw = evaluation(contexts), random.Random(4)
    answers = tuple(
        replace(row, right=abs(row.right - (draw.random() < flips))) if row.repeat else row
        for row in record.answers
    )
    return replace(record, answers=answers, design=Design(CELLS * contexts, margin=margin))


def test_an_engine_that_flips_too_much_for_the_margin_is_refused() -> None:
    with pytest.raises(QualityError) as caught:
        check_noise(restless(0.6, 60, 0.03))
    for part in ("A/A: ", "a margin of 3 points needs ", "240 are planned", "deterministic"):
        assert part in str(caught.value)
    check_noise(restless(0.02, 60, 0.03))


def test_a_plan_too_small_for_its_margin_is_not_blamed_on_the_engine() -> None:
    check_noise(restless(0.6, 60, 0.005))


def test_the_noise_of_single_contexts_is_not_known_yet() -> None:
    # One context of each cell was asked twice: their spread is nobody's to know.
    record = restless(0.6, 4, 0.3)
    again = [row for row in record.answers if row.repeat and row.length in LENGTHS]
    assert len({row.context for row in again}) == CELLS
    check_noise(record)


def test_questions_behind_a_context_are_counted() -> None:
    # Four questions tell less than eight: this plan was too small before anything was asked.
    assert Design(CELLS * 60, margin=0.0225).needed(*spread(DISCORDANCE, CORRELATION, 8)) <= 240
    check_noise(restless(0.6, 60, 0.0225))


def test_a_reference_that_only_guesses_is_refused() -> None:
    record = evaluation(12)
    check_floor(record)
    wrong = tuple(replace(row, right=0.0) for row in record.answers)
    with pytest.raises(QualityError, match="hardly more than guessing"):
        check_floor(replace(record, answers=wrong))
