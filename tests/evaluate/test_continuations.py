"""Prompts whose answer nobody knows: every arm against what the reference says, and no verdict."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_indexcache.evaluate import run
from sglang_indexcache.evaluate.journal import NAME, load
from sglang_indexcache.evaluate.plan import Material, Plan
from sglang_indexcache.evaluate.report import write_report
from sglang_indexcache.evaluate.shelf import Bounds, fill_shelf
from sglang_indexcache.evaluate.tasks import UNSCORED
from tests.evaluate.evaluate import evaluate
from tests.evaluate.fake_server import HAYSTACK, TOPK, Fake, Words, serving
from tests.evaluate.tasks.published import prompt_row, write


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "PAUSES", (0.0, 0.0, 0.0))


def planned(folder: Path, answered: int = 0) -> tuple[Plan, Material]:
    rows = [prompt_row(n, " 3" if n < answered else None) for n in range(8 + answered)]
    bounds = Bounds((512,), 4096, TOPK, 16, 2, 0, False)
    shelf = fill_shelf({"prompts": write(folder / "p.jsonl", rows)}, Words(), bounds)
    plan = Plan((), (512,), 16, 4, TOPK, margin=0.5, looks=2, taken=shelf.taken)
    return plan, Material(Words(), HAYSTACK, 4, shelf.items)


def test_arms_are_held_against_what_the_reference_says(tmp_path: Path) -> None:
    plan, material = planned(tmp_path)
    fake = Fake()
    with serving(fake) as url:
        found = evaluate(tmp_path / "out", url, plan, material=material)
    assert found.finished
    assert found.verdicts() == {}
    rows = [row for row in found.answers if row.task == UNSCORED]
    assert len(rows) == 8 * 4 + 2
    for row in rows:
        assert (row.right, row.nll) == (None, None)
        assert row.tokens in (2, 4)
        assert (row.kl is None) == (row.arm == "full" and not row.repeat)
    noise = [row for row in rows if row.repeat]
    assert all(row.kl == 0 and row.agreement == 1 for row in noise)
    assert any(row.kl for row in rows if row.arm == "few")
    said = [body for body in fake.asked if body["sampling_params"][0]["max_new_tokens"]]
    assert len(said) == 8  # of the reference alone, once a prompt
    # What was said is what is scored: the fake says the prompt's length first.
    kept = [json.loads(line) for line in (tmp_path / "out" / NAME).read_text().splitlines()]
    texts = {one["continued"]: one["ids"] for one in kept if "continued" in one}
    for one in plan.planned:
        if one.task == UNSCORED:
            size = len(material.make(one).ids)
            assert texts[one.context] in ([size, 6, 8, 5], [size + 1, 5])
    assert load(tmp_path / "out") == found


def test_no_verdict_is_claimed_and_the_report_says_what_was_seen(tmp_path: Path) -> None:
    plan, material = planned(tmp_path)
    with serving(Fake()) as url:
        found = evaluate(tmp_path / "out", url, plan, material=material)
    half, few = write_report(found, tmp_path / "out").split("\n")
    assert half.startswith("half: no verdict, since these prompts have no right answer.")
    assert "behind 8 of them" in few
    assert "(A/A: 100.0% and 0.0000)" in few
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Prompts without a right answer" in page
    assert "none: no right answer is known" in page
    assert "Told." in page
    told = json.loads((tmp_path / "out" / "eval.json").read_text())["secondary"]["closeness"]
    rows = [row for row in found.answers if row.arm == "few" and row.task == UNSCORED]
    [whole] = [row for row in told if row["arm"] == "few" and not row["length"]]
    assert whole["prompts"] == len(rows) == 8
    assert whole["kl"] == pytest.approx(sum(row.kl or 0 for row in rows) / 8)
    assert whole["agreement"] == pytest.approx(sum(row.agreement or 0 for row in rows) / 8)


def test_answers_make_the_verdict_and_continuations_stand_beside(tmp_path: Path) -> None:
    plan, material = planned(tmp_path, answered=6)
    with serving(Fake()) as url:
        found = evaluate(tmp_path / "out", url, plan, material=material)
    assert plan.design.contexts == found.design.contexts == 6
    assert found.tasks == (UNSCORED, "prompts") or found.tasks == ("prompts", UNSCORED)
    assert set(found.verdicts()) == {"half", "few"}
    assert {row.task for row in found.outcomes()} == {"notes", "prompts"}
    write_report(found, tmp_path / "out")
    data = json.loads((tmp_path / "out" / "eval.json").read_text())["secondary"]
    assert {row["prompts"] for row in data["closeness"]} == {8, 2}
    assert sum(row["questions"] for row in data["kl"] if row["arm"] == "few") == 6


def test_a_stop_does_not_ask_twice_for_what_was_said(tmp_path: Path) -> None:
    plan, material = planned(tmp_path)
    with serving(Fake()) as url:
        whole = evaluate(tmp_path / "a", url, plan, material=material)
        lines = (tmp_path / "a" / NAME).read_text().splitlines(keepends=True)
        first = next(n for n, line in enumerate(lines) if "continued" in line)
        (tmp_path / "b").mkdir()
        (tmp_path / "b" / NAME).write_text("".join(lines[: first + 2]))
        fake = Fake()
    with serving(fake) as url:
        found = evaluate(tmp_path / "b", url, plan, material=material)
    said = [body for body in fake.asked if body["sampling_params"][0]["max_new_tokens"]]
    assert len(said) == 8 - (1 + ("continued" in lines[first + 1]))
    assert replace(found, seconds=0, tokens=0) == replace(whole, seconds=0, tokens=0)


def test_prompts_that_continue_each_other_share_their_own_cache(tmp_path: Path) -> None:
    """As the turns of one conversation do; found on a real server."""
    text = prompt_row(1, words=60)["prompt"]
    rows = [{"prompt": f"{text} and {n}".removesuffix(" and 0")} for n in range(20)]
    bounds = Bounds((512,), 4096, TOPK, 20, 2, 0, False)
    shelf = fill_shelf({"prompts": write(tmp_path / "p.jsonl", rows)}, Words(), bounds)
    plan = Plan((), (512,), 20, 4, TOPK, margin=0.5, looks=2, taken=shelf.taken)
    material = Material(Words(), HAYSTACK, 4, shelf.items)
    with serving(Fake()) as url:
        assert evaluate(tmp_path / "run", url, plan, material=material).finished
