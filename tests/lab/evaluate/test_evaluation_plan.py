"""Plan of an evaluation: its questions, their order, and what they cost."""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sglang_indexcache.errors import QualityError
from sglang_indexcache.lab.demo import shipped_checkpoint
from sglang_indexcache.lab.evaluate import corpus
from sglang_indexcache.lab.evaluate.corpus import Corpus
from sglang_indexcache.lab.evaluate.evaluation_plan import (
    CONTROL_LOOK,
    SEEING,
    EvaluationPlan,
    SelectedRows,
    arms_of,
    default_lengths,
    enough_contexts,
)
from sglang_indexcache.lab.evaluate.run import EvaluationRequest
from sglang_indexcache.lab.evaluate.tasks import DEFAULT, TASKS
from sglang_indexcache.lab.evaluate.tasks.context import Context, Task
from tests.lab.evaluate.evaluate import ARMS
from tests.lab.evaluate.fake_server import Words

PLAN = EvaluationPlan(("notes", "tracking"), (256, 512), 10, 4, 64, margin=0.02, looks=4)
CORPUS = Corpus(Words(), 4)


@pytest.mark.parametrize(
    ("context", "lengths"),
    [
        (202_752, (32768, 65536, 131072, 200_000)),  # GLM-5
        (163_840, (32768, 65536, 131072, 160_000)),  # DeepSeek-V3.2
        (131_072, (32768, 65536, 130_000)),
        (133_000, (32768, 65536, 131072)),
        (8192, (7100,)),
        (4096, (3500,)),
        (1024, (890,)),
        (512, (440,)),
        (None, (32768, 65536, 131072)),
    ],
)
def test_lengths_run_up_to_the_context(context: int | None, lengths: tuple[int, ...]) -> None:
    assert default_lengths(context) == lengths
    assert context is None or lengths[-1] <= context - min(1024, context // 8)


def test_a_name_before_a_pattern_names_the_arm() -> None:
    given = ("searched=FSSFSSSFSSSS", "1/2", "letters=" + "FFFS" * 3)
    arms = arms_of(Path(shipped_checkpoint()), "all=full", given, "bad=uniform:1/4")
    assert [arm.name for arm in arms] == ["all", "letters", "1/2", "searched", "bad"]
    assert [arm.pattern for arm in arms][::3] == ["F" * 12, "FSSFSSSFSSSS"]


def test_every_look_has_as_many_contexts_in_every_cell() -> None:
    counts: Counter[tuple[str, int]] = Counter()
    for look in range(1, 5):
        counts.update((p.task, p.length) for p in PLAN.planned if p.look == look)
        assert len(set(counts.values())) == 1
        assert sum(counts.values()) == pytest.approx(look / 4 * PLAN.design.contexts, abs=4)
    assert sum(counts.values()) == PLAN.design.contexts == 40


def test_a_quarter_is_asked_twice_and_the_control_is_short() -> None:
    long = [p for p in PLAN.planned if p.look != CONTROL_LOOK]
    assert sum(p.again for p in long) == 12  # 3 of 10 in each of 4 cells
    control = [p for p in PLAN.planned if p.look == CONTROL_LOOK]
    assert control
    assert all(p.length == 48 <= PLAN.selects_all and p.again for p in control)


@pytest.mark.parametrize("place", [0, 5])
def test_contexts_are_those_of_the_plan(place: int) -> None:
    planned = PLAN.planned[place]
    drawn = CORPUS.make(planned)
    assert (drawn.name, drawn.task, drawn.length) == (planned.context, planned.task, planned.length)
    longest = max(len(q.ids) + len(q.answer) for q in drawn.questions)
    assert len(drawn.ids) + longest == planned.length
    assert CORPUS.make(planned) == drawn


def test_the_cost_is_what_would_be_computed() -> None:
    """Against counting every planned context, with pages of 64."""
    plan = replace(PLAN, tasks=("notes",))
    tokens = EvaluationRequest(Path(), ARMS[:3], plan, CORPUS, "").tokens()
    counted = 0
    for planned in plan.planned:
        drawn = CORPUS.make(planned)
        cached = len(drawn.ids) // 64 * 64
        question_tokens = sum(
            len(drawn.ids) - cached + len(q.ids) + len(q.answer) for q in drawn.questions
        )
        counted += (3 + planned.again) * (len(drawn.ids) + question_tokens)
    assert tokens == pytest.approx(counted, rel=0.1)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (EvaluationPlan(("needles", "notes"), (128,), 4, 4, 64), "needles: with 4 questions it do"),
        (EvaluationPlan(("tracking",), (1024,), 4, 4, 12), "not even one question fits the 9 tok"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_asked(
    plan: EvaluationPlan, message: str
) -> None:
    with pytest.raises(QualityError, match=message):
        CORPUS.check(plan.planned, Console(file=io.StringIO()))


def test_more_contexts_show_smaller_losses() -> None:
    plans = [replace(PLAN, contexts=count) for count in (10, 100, 1000)]
    detectable = [plan.design.detectable(*plan.assumed) for plan in plans]
    assert detectable == sorted(detectable, reverse=True)


@pytest.mark.parametrize(("lengths", "margin"), [((256,), 0.01), ((256, 512, 1024), 0.01)])
def test_a_plan_of_default_size_can_show_its_margin(
    lengths: tuple[int, ...], margin: float
) -> None:
    """The default to 128Ki asked for 576 contexts where one point needs 671."""
    contexts = enough_contexts(len(DEFAULT) * len(lengths), 8, margin, 4)
    plan = EvaluationPlan(DEFAULT, lengths, contexts, 8, 64, margin)
    assert plan.design.needed(*plan.assumed) <= plan.design.contexts
    fewer = replace(plan, contexts=contexts - 4)
    # The other cells leave the claim.
    assert fewer.design.needed(*fewer.assumed) > SEEING * fewer.design.contexts
    assert enough_contexts(18, 8, 0.2, 4) == 32


def test_the_longest_contexts_are_asked_first() -> None:
    """Their rate, the slowest, tells how long everything takes at most."""
    long = [p for p in PLAN.planned if p.look != CONTROL_LOOK]
    assert [p.length for p in long[:4]] == [512, 512, 256, 256]


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"lengths": (64,)}, r"64 tokens can show nothing: up to 64 tokens \(index_topk\)"),
        ({"lengths": ()}, "no tokens can show nothing"),
        ({"tasks": ("needle",)}, "no task is called 'needle'; there are needles.*eval compare"),
        ({"tasks": ("notes", "notes")}, "each task once"),
        ({"margin": 1.0}, "margin of 100 points is not above 0 and below 100"),
        ({"contexts": 3}, "3 contexts of each task and length cannot be looked at 4 times"),
        (
            {
                "contexts": 3,
                "tasks": (),
                "taken": (SelectedRows("prompts", 256, (1, 2, 3), (9,) * 3, 10, (1,) * 3, 9),),
            },
            "cannot be looked at 4 times",
        ),
        ({"margin": 0.0}, "margin of 0 points is not above 0 and below 100"),
    ],
)
def test_what_cannot_be_asked_is_refused(changed: dict[str, object], sentence: str) -> None:
    with pytest.raises(QualityError, match=sentence):
        replace(PLAN, **changed)  # type: ignore[arg-type]


def test_an_impossible_seed_is_skipped_by_rule_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told before anything is asked: a run once ended at a context that could not be made."""
    make_context = corpus.make_context

    def picky(name: str, task: Task, *of: Any, **keywords: Any) -> Context:
        if (name, *of[1:3]) == ("tracking", 512, 3):
            raise QualityError("tracking does not fit")
        return make_context(name, task, *of, **keywords)

    monkeypatch.setattr(corpus, "make_context", picky)
    plans = (
        replace(PLAN, tasks=("notes",)),
        replace(PLAN, tasks=("tracking",), lengths=(512,), selects_all=240),
    )
    output = io.StringIO()
    for plan in plans:
        CORPUS.check(plan.planned, Console(file=output))
    assert output.getvalue().strip() == (
        "tracking-512-3 is made from seed 1000003 instead: tracking does not fit"
    )
    [planned] = [place for place in plans[1].planned if place.context == "tracking-512-3"]
    first, second = (
        CORPUS.make(planned),
        make_context("tracking", TASKS["tracking"], Words(), 512, 1_000_003, questions=4),
    )
    assert (first.name, first.ids) == ("tracking-512-3", second.ids)
    monkeypatch.setattr(corpus, "make_context", Raising())
    with pytest.raises(QualityError, match="no task can do this"):
        CORPUS.make(planned)


class Raising:
    """A task that no seed helps."""

    def __call__(self, *_: object, **__: object) -> Context:
        raise QualityError("no task can do this")


def test_the_page_counts_the_contexts_of_the_default_tasks() -> None:
    page = (Path(__file__).parents[3] / "docs" / "evaluate.md").read_text()
    cells = 3 * len(DEFAULT)
    contexts = cells * enough_contexts(cells, 8, 0.01, 4)
    assert f"which is {contexts:,} contexts with {8 * contexts:,} questions" in page
