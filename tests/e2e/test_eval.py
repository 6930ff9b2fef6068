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
from sglang_indexcache.lab.evaluate.corpus import Corpus
from sglang_indexcache.lab.evaluate.plan import EvaluationPlan, arms_of
from sglang_indexcache.lab.evaluate.run import EvaluationRequest, run_evaluation
from sglang_indexcache.pattern import Pattern
from tests.e2e.conftest import ROUNDING, Serve
from tests.oracle import Oracle

TINY = Path(sglang_indexcache.__file__).parent / "demo" / "tiny-dsa"
PLAN = EvaluationPlan(("notes",), (256,), 2, 4, 64, margin=0.2, looks=1)


@pytest.fixture(scope="module")
def client(serve: Serve) -> Iterator[Client]:
    arguments = ["--dtype", "float32", "--indexcache-mode", "live", "--max-total-tokens", "16384"]
    with serve(TINY, *arguments) as client:
        yield client


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus(AutoTokenizer.from_pretrained(TINY), PLAN.questions)


def test_answers_have_the_loss_that_transformers_gives_them(
    client: Client, corpus: Corpus, tmp_path: Path
) -> None:
    """So have every arm's, though a context was computed once and its questions were cached."""
    arms = arms_of(TINY, "full", ("uniform:1/4",), "")
    request = EvaluationRequest(TINY, arms, PLAN, corpus, "")
    console = Console(file=io.StringIO())
    found = run_evaluation(request, {"": client}, tmp_path, console, agree=lambda _: None)
    assert found.finished
    assert found.verified
    oracle = Oracle(TINY, torch.float32)
    planned = {one.context: corpus.make(one) for one in found.planned}
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
    losses = {(row.arm, row.repeat, row.context, row.question): row.nll for row in found.answers}
    for (arm, repeat, context, question), loss in losses.items():
        if repeat or (arm != "full" and planned[context].length <= PLAN.selects_all):
            assert loss == losses["full", 0, context, question]
