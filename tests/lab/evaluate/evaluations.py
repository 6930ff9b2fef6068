"""A made-up evaluation with known truths, as the journal would have it."""

from __future__ import annotations

import random
from typing import Any

from sglang_indexcache.lab.evaluate.evaluation import Evaluation
from sglang_indexcache.lab.evaluate.evaluation_plan import CONTROL_LOOK, Arm, Planned, Role
from sglang_indexcache.lab.stats.design import Design
from sglang_indexcache.lab.stats.pairs import Answer

TASKS, LENGTHS, SHORT = ("needles", "tracking"), (32768, 131072), 1536
FACTS: dict[str, Any] = {
    "model": "some-model",
    "checkpoint": "0123456789abcdef" * 4,
    "material": "fedcba9876543210-4",
    "server": {"sglang": "0.5.23", "dtype": "bfloat16"},
    "versions": {"sglang-indexcache": "0.1.0"},
    "commit": "abcdef123456",
    "flags": ["--task", "needles", "--margin", "0.02"],
    "started": "2026-11-22T10:00:00Z",
}
PATTERNS = {"full": "FFFF", "half": "FSFS", "quarter": "FSSS", "uniform:1/4": "FSSS"}
LOSSES = {"full": 0.0, "half": 0.0, "quarter": 0.15, "uniform:1/4": 0.5}
ROLES = {"full": Role.REFERENCE, "uniform:1/4": Role.BAD}


def evaluation(contexts: int = 60, *, seed: int = 0, **changes: Any) -> Evaluation:
    """Two tasks at two lengths, ``contexts`` of each, one in four asked twice, and the control.

    "half" loses nothing, "quarter" loses 15 % of its right answers, "uniform:1/4" half of them.
    """
    draw = random.Random(seed)
    planned, answers = [], []
    for task in TASKS:
        planned.append(Planned(f"{task}-short", task, SHORT, CONTROL_LOOK, again=True))
    for number in range(contexts):
        for task in TASKS:
            for length in LENGTHS:
                look = 1 + 4 * number // contexts
                name = f"{task}-{length}-{number}"
                planned.append(Planned(name, task, length, look, again=number % 4 == 0))
    for place in planned:
        for question in range(4):
            answers += _question(draw, place, question)
    fields: dict[str, Any] = {
        "facts": FACTS,
        "design": Design(contexts=contexts * len(TASKS) * len(LENGTHS), margin=0.02),
        "selects_all": 2048,
        "arms": tuple(
            Arm(name, PATTERNS[name], ROLES.get(name, Role.CANDIDATE)) for name in LOSSES
        ),
        "planned": tuple(planned),
        "answers": tuple(answers),
        "tokens": 1_234_567,
        "seconds": 60.0,
        "finished": True,
    }
    return Evaluation(**(fields | changes))


def answer(place: tuple[str, str, str, int], arm: str, right: float, repeat: int = 0) -> Answer:
    """Make an answer at a place: context, question, task and length."""
    return Answer(arm, repeat, *place, None, float(right))


def _question(draw: random.Random, place: Planned, question: int) -> list[Answer]:
    control = place.look == CONTROL_LOOK
    right, depth = control or draw.random() < 0.9, draw.random()
    answers = []
    for arm, loss in LOSSES.items():
        is_kept = control or draw.random() >= loss
        for repeat in range(2 if arm == "full" and place.again else 1):
            is_right = control or repeat == 0 or draw.random() < 0.99
            answer = right if is_right else not right
            answers.append(
                Answer(
                    arm,
                    repeat,
                    place.context,
                    f"q{question}",
                    place.task,
                    place.length,
                    depth,
                    float(answer and is_kept),
                    logprobs=(-(0.1 + (2 * loss * depth) + 0.05 * draw.random()),),
                    tokens=7,
                )
            )
    return answers
