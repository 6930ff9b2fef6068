"""State of an evaluation: how far it came, what counts, and when a claim is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from sglang_indexcache.lab.evaluate.evaluation import Evaluation
from sglang_indexcache.lab.evaluate.evaluation_plan import Arm, Planned, Role
from sglang_indexcache.lab.evaluate.verdict import Kind, verdicts_of
from sglang_indexcache.lab.stats.design import Design
from sglang_indexcache.lab.stats.pairs import Answer

ARMS = (
    Arm("full", "FFFF", Role.REFERENCE),
    Arm("more", "FFFS", Role.CANDIDATE),
    Arm("less", "FSFS", Role.CANDIDATE),
    Arm("bad", "FSSS", Role.BAD),
)
CONTEXTS = 400
PLANNED = (
    Planned("short", "notes", 48, 0, False),
    *(Planned(f"c{n}", "notes", 512, n * 2 // CONTEXTS + 1, n % 4 == 0) for n in range(CONTEXTS)),
)
Wrong = Callable[[str, int], bool]


def evaluation(wrong: Wrong) -> Evaluation:
    """Make one question a context; the bad arm is always wrong, others where ``wrong`` says."""
    answers = []
    for place, planned in enumerate(PLANNED):
        for arm in ARMS:
            for repeat in range(2 if arm.role is Role.REFERENCE and planned.again else 1):
                long = planned.look > 0
                is_wrong = long and (arm.role is Role.BAD or wrong(arm.name, place - 1))
                answers.append(
                    Answer(
                        *(arm.name, repeat, planned.context, "q0", "notes", planned.length, 0.5),
                        right=float(not is_wrong),
                        logprobs=(-float(is_wrong),),
                    )
                )
    return Evaluation({}, Design(CONTEXTS, 0.1, 2), 64, ARMS, PLANNED, tuple(answers))


def kinds(record: Evaluation) -> dict[str, tuple[int, Kind]]:
    return {name: (look, verdict.kind) for name, (look, verdict) in verdicts_of(record).items()}


def upto(record: Evaluation, contexts: int) -> Evaluation:
    """Return the control and so many contexts of it."""
    names = {planned.context for planned in PLANNED[: contexts + 1]}
    return replace(record, answers=tuple(row for row in record.answers if row.context in names))


def test_the_first_claim_ends_a_patterns_evaluation() -> None:
    """Though everything is lost from then on."""
    record = evaluation(lambda arm, place: arm == "more" and place >= CONTEXTS // 2)
    assert kinds(upto(record, CONTEXTS // 2))["more"] == (1, Kind.NO_LOSS)
    assert kinds(record)["more"] == (1, Kind.NO_LOSS)


def test_no_pattern_is_called_safe_behind_one_that_loses() -> None:
    kinds_of = kinds(evaluation(lambda arm, place: arm == "more" and place % 2 == 0))
    assert kinds_of["more"] == (1, Kind.LOSS)
    assert kinds_of["less"] == (2, Kind.UNDECIDED)
    assert kinds(evaluation(lambda *_: False))["less"] == (1, Kind.NO_LOSS)


@pytest.mark.parametrize(("contexts", "look"), [(0, 0), (199, 0), (200, 1), (399, 1), (400, 2)])
def test_a_look_is_reached_by_its_last_context(contexts: int, look: int) -> None:
    record = upto(evaluation(lambda *_: False), contexts)
    assert record.look == look
    assert {row.context for row in record.until(0)} == {"short"}
