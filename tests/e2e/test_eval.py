"""An evaluation on a real server, held against transformers."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoTokenizer

import sglang_indexcache
from sglang_indexcache.ask.client import Client
from sglang_indexcache.evaluate.plan import Material, Plan
from sglang_indexcache.evaluate.session import Request, run_evaluation
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.stats.pairs import paired
from sglang_indexcache.support.text import machine_text
from tests.e2e.conftest import ROUNDING, Serve
from tests.oracle import Oracle

TINY = Path(sglang_indexcache.__file__).parent / "demo" / "tiny-dsa"
PLAN = Plan(("notes",), (256,), 2, 4, 64, margin=0.2, looks=1)


@pytest.fixture(scope="module")
def client(serve: Serve) -> Iterator[Client]:
    arguments = ["--dtype", "float32", "--indexcache-mode", "live", "--max-total-tokens", "16384"]
    with serve(TINY, *arguments) as client:
        yield client


@pytest.fixture(scope="module")
def material() -> Material:
    haystack = "\n".join(machine_text(100_000))
    return Material(AutoTokenizer.from_pretrained(TINY), haystack, PLAN.questions)


def request(**changes: object) -> Request:
    return Request(TINY, "full", ("uniform:1/4",), "", PLAN, "", **changes)  # type: ignore[arg-type]


def evaluate(client: Client, material: Material, folder: Path, **changes: object):  # type: ignore[no-untyped-def]
    console = Console(file=io.StringIO())
    return run_evaluation(
        request(**changes), {"": client}, material, folder, console, agree=lambda _: None
    )


def test_answers_have_the_loss_that_transformers_gives_them(
    client: Client, material: Material, tmp_path: Path
) -> None:
    """Of every arm, though each context was computed once and its questions came from the cache."""
    found = evaluate(client, material, tmp_path)
    assert found.finished
    assert found.pattern_verified
    oracle = Oracle(TINY, torch.float32)
    planned = {one.context: material.make(one) for one in found.planned}
    patterns = {arm.name: Pattern(arm.pattern) for arm in found.arms}
    decided = 0
    for row in found.answers:
        context = planned[row.context]
        [question] = [one for one in context.questions if one.name == row.question]
        ids = context.ids + question.ids + question.answer
        told = oracle.answer(ids, patterns[row.arm])
        if told.margin > ROUNDING:
            expected = -told.logprobs[-len(question.answer) :].mean().item()
            assert row.nll == pytest.approx(expected, abs=1e-3)
            decided += 1
    assert decided > len(found.answers) // 4
    rows = found.outcomes("nll")
    assert not paired(rows, "full", "full", repeat=1).values.any()
    control = [row for row in rows if row.length <= found.selects_all]
    assert not paired(control, "uniform:1/4", "full").values.any()


def test_replies_are_right_where_teacher_forcing_is(
    client: Client, material: Material, tmp_path: Path
) -> None:
    forced = evaluate(client, material, tmp_path / "a")
    generated = evaluate(client, material, tmp_path / "b", reply_tokens=24)
    both = {(r.arm, r.repeat, r.context, r.question): r.right for r in forced.answers}
    for row in generated.answers:
        assert both[row.arm, row.repeat, row.context, row.question] == row.right
