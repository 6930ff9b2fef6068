"""Replies of the model's own, and what the tasks' sources give them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sglang_indexcache.errors import QualityError
from sglang_indexcache.evaluate.evaluation import Mode
from sglang_indexcache.evaluate.metrics import METRICS
from sglang_indexcache.evaluate.plan import Material, Plan
from sglang_indexcache.evaluate.replies import reply
from sglang_indexcache.evaluate.shelf import Bounds, fill_shelf
from sglang_indexcache.evaluate.tasks import FILES, TASKS
from tests.evaluate.evaluate import ARMS, PLAN, evaluate, material_of
from tests.evaluate.fake_server import HAYSTACK, TOPK, Fake, Words, serving
from tests.evaluate.tasks.published import prompt_row, write


def knowing(**changes: object) -> Fake:
    """A server that knows the right answers of the plan."""
    material = material_of(PLAN)
    made = [material.make(planned) for planned in PLAN.planned]
    known = {tuple(c.ids + q.ids): q.answer for c in made for q in c.questions}
    return replace(Fake(known=known), **changes)  # type: ignore[arg-type]


def test_greedy_is_right_where_teacher_forcing_is(tmp_path: Path) -> None:
    with serving(knowing()) as url:
        forced = evaluate(tmp_path / "a", url)
        generated = evaluate(tmp_path / "b", url, mode=Mode.GENERATE, ask=reply)
    assert generated.mode is Mode.GENERATE
    both = {(row.arm, row.repeat, row.context, row.question): row.right for row in forced.answers}
    for row in generated.answers:
        assert both[row.arm, row.repeat, row.context, row.question] == row.right
        assert row.reply is not None
        assert row.score is not None
        assert (row.nll, row.kl) == (None, None)
    assert {row.right for row in generated.answers} == {True, False}


def test_replies_that_are_cut_are_refused(tmp_path: Path) -> None:
    said = "replies were ended by their length, more than 5%.*--reply-tokens"
    with serving(knowing(fault="rambles")) as url, pytest.raises(QualityError, match=said):
        evaluate(tmp_path, url, mode=Mode.GENERATE, ask=reply)


def test_replies_to_a_users_file_end_where_the_model_ends_them(tmp_path: Path) -> None:
    """And are right where the published metric says so, whatever their tokens."""
    path = write(tmp_path / "p.jsonl", [prompt_row(n, "Token") for n in range(8)])
    shelf = fill_shelf({"prompts": path}, Words(), Bounds((512,), 4096, TOPK, 8, 1, 0, True))
    plan = Plan((), (512,), 8, 4, TOPK, margin=0.5, looks=1, taken=shelf.taken)
    material = Material(Words(), HAYSTACK, 4, shelf.items)
    made = [material.make(one) for one in plan.planned]
    fake = Fake(known={tuple(c.ids + q.ids): q.answer for c in made for q in c.questions})
    with serving(fake) as url:
        found = evaluate(tmp_path / "out", url, plan, ARMS, Mode.GENERATE, material, ask=reply)
    rows = [row for row in found.answers if row.task == "prompts"]
    assert rows
    assert all(row.reply and row.right and row.score == 1.0 for row in rows)  # " token[..]"
    asked = [body for body in fake.asked if body["sampling_params"][0]["max_new_tokens"]]
    stops = {
        (len(ids) > TOPK, "stop" in parameters)
        for body in asked
        for ids, parameters in zip(body["input_ids"], body["sampling_params"], strict=True)
    }
    assert stops == {(True, False), (False, True)}  # the file, and the control's lines


def test_every_task_has_a_metric() -> None:
    assert set(METRICS) == {*TASKS, *FILES}


@pytest.mark.parametrize(
    ("task", "said", "answer", "score"),
    [
        ("needles", " It is AB-12.", " ab-12", 1.0),
        ("needles", "ab", " ab-12", 0.0),
        ("tracking", "ABCDE and KLMNO", " ABCDE, FGHIJ, KLMNO", 2 / 3),
        # MRCR's card: nothing without the mark, and then what SequenceMatcher says.
        ("rounds", " 0123456789abcd", " 0123456789abcd", 1.0),
        ("rounds", "abcd", " 0123456789abcd", 0.0),
        ("rounds", "0123456789abxy", " 0123456789abcd", 0.5),
        # GraphWalks: precision 1/2, recall 1/3.
        ("parents", "a, x]", "a, b, c]", 0.4),
        ("parents", "x]", "a]", 0.0),
        ("parents", "]", "]", 1.0),
        ("parents", "b, a]", "a, b]", 1.0),
        ("lookup", "C) because", "C", 1.0),
        ("lookup", "B", "C", 0.0),
        ("lookup", "(B)", "B", 1.0),
        ("lookup", "**D**", "D", 1.0),
        ("lookup", "The correct answer is (A).", "A", 1.0),
        # The first letter of prose says nothing.
        ("lookup", "Based on the text, the passage stands in x: the answer is (C).", "B", 0.0),
        ("lookup", "According to the document, it is (D).", "A", 0.0),
        ("lookup", "A section further on, so (D).", "A", 0.0),
        ("lookup", "Certainly! The correct answer is (A).", "C", 0.0),
        ("lookup", "Despite a long search I cannot find it.", "D", 0.0),
        ("prompts", "It is 4.", "4", 1.0),
        ("prompts", "It is 14.", "4", 0.0),
        ("prompts", "I do not know.", "No", 0.0),
        ("prompts", "So A, I think", " a", 1.0),
        ("prompts", "And more", "A", 0.0),
        ("prompts", "It costs $5.", "$5", 1.0),
        ("prompts", "\u7b54\u6848\u662f\u5317\u4eac\u3002", "\u5317\u4eac", 1.0),  # no spaces
        ("notes", " read it", " read", 1.0),
        ("notes", " reader", " read", 0.0),
        ("notes", "", " read", 0.0),
    ],
)
def test_published_rules(task: str, said: str, answer: str, score: float) -> None:
    assert METRICS[task](said, answer) == pytest.approx(score)
