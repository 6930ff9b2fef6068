"""An evaluation on a fake server: in this process, or one to be killed.

python -m tests.evaluate.evaluate FOLDER URL
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_indexcache.ask.client import Client
from sglang_indexcache.evaluate.arms import make_arms
from sglang_indexcache.evaluate.chat import ChatEndpoint, is_chat
from sglang_indexcache.evaluate.evaluation import Arm, Evaluation, Mode, Role
from sglang_indexcache.evaluate.journal import EvaluationJournal, identity
from sglang_indexcache.evaluate.plan import Material, Plan
from sglang_indexcache.evaluate.run import Run
from tests.evaluate.fake_server import HAYSTACK, TOPK, Words

ARMS = (
    Arm("full", "FFFFFFFFFFFF", Role.REFERENCE),
    Arm("half", "FFSFFSFSFSFS", Role.CANDIDATE),
    Arm("few", "FSSSFSSSFSSS", Role.CANDIDATE),
    Arm("worst", "FSSSSSSSSSSS", Role.BAD),
)
PLAN = Plan(("notes",), (128, 160), 8, 4, TOPK, margin=0.1, looks=2)


def material_of(plan: Plan) -> Material:
    return Material(Words(), HAYSTACK, plan.questions)


def evaluate(
    folder: Path,
    urls: str | Mapping[str, str],
    plan: Plan = PLAN,
    arms: tuple[Arm, ...] = ARMS,
    mode: Mode = Mode.TEACHER_FORCED,
    material: Material | None = None,
    **run: Any,
) -> Evaluation:
    """Everything that is left of the evaluation in ``folder``."""
    named = {"": urls} if isinstance(urls, str) else urls
    clients = {n: ChatEndpoint(url) if is_chat(url) else Client(url) for n, url in named.items()}
    serving = make_arms(arms, clients)
    material = material or material_of(plan)
    who = identity(
        plan,
        arms,
        mode,
        checkpoint="c",
        material=material.digest,
        server={},
        pattern_verified=serving.verified,
    )
    with EvaluationJournal(folder, who) as journal:
        journal.note({"started": "then", "notices": ["Told."]})
        return Run(serving, material, journal, **run).run()


if __name__ == "__main__":
    evaluate(Path(sys.argv[1]), sys.argv[2])
