"""The shipped checkpoint on one server in live mode: answers, selections and an evaluation.

All are transformers'. Answers carry what layers used with ``--enable-return-indexer-topk``, of S
layers their F layer's; so they do in static mode, on ranks.
"""

from __future__ import annotations

import io
import json
import os
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import AutoTokenizer

from sglang_indexcache.lab.client.http import Client
from sglang_indexcache.lab.evaluate.corpus import Corpus
from sglang_indexcache.lab.evaluate.evaluation_plan import EvaluationPlan, arms_of
from sglang_indexcache.lab.evaluate.run import EvaluationRequest, run_evaluation
from sglang_indexcache.lab.evaluate.tasks import TASKS
from sglang_indexcache.lab.evaluate.tasks.context import make_context
from sglang_indexcache.lab.search.evaluators.hf import TransformersEvaluator
from sglang_indexcache.lab.search.lists import kept_list
from sglang_indexcache.lab.search.methods.pairwise import most_similar
from sglang_indexcache.lab.search.rules import Constraints
from sglang_indexcache.lab.search.setup import Setup
from sglang_indexcache.library.files import load_entry
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.protocol import named
from tests.cli.test_search import TINY, call, words_of
from tests.e2e.conftest import ROUNDING, Serve, batch_logprobs, greedy, is_greedy, prompt
from tests.oracle import Oracle, _recorded_margins

TOPK = 64
UNDECIDED = 1e-6
"""Share of a row's best score by which float32 sums of two processors may differ."""
PLAN = EvaluationPlan(("notes",), (256,), 2, 4, 64, margin=0.2, looks=1)
ARGUMENTS = ("--dtype", "float32", "--max-total-tokens", "16384", "--enable-return-indexer-topk")
CHUNK = ("--chunked-prefill-size", "128")


def lists_of(client: Client, ids: list[int], count: int, pattern: str = "") -> np.ndarray:
    """``[layers, tokens, k]`` of a prompt and of what was generated behind it, but the last."""
    sampling = {"max_new_tokens": count, "temperature": 0.0, "ignore_eos": True}
    reply = client.generate(
        input_ids=ids,
        sampling_params=sampling | (named(pattern) if pattern else {}),
        return_indexer_topk=True,
    )
    lists = np.frombuffer(b64decode(reply["meta_info"]["indexer_topk"]), dtype=np.int32)
    return lists.reshape(len(ids) + count - 1, -1, TOPK).transpose(1, 0, 2)


def check(lists: np.ndarray, pattern: Pattern) -> None:
    """Every list is of tokens that its query sees; S layers have their F layer's."""
    for layer, source in enumerate(pattern.sources):
        assert (lists[layer] == lists[source]).all()
    for query in range(lists.shape[1]):
        for layer in pattern.full_layers:
            tokens = [token for token in lists[layer, query] if token >= 0]
            assert len(set(tokens)) == len(tokens) == min(query + 1, TOPK)
            assert max(tokens) <= query
    pairs = zip(pattern.full_layers, pattern.full_layers[1:], strict=False)
    assert all((lists[a] != lists[b]).any() for a, b in pairs)


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(TINY, torch.float32)


@pytest.fixture(scope="module")
def tiny(serve: Serve) -> Iterator[Client]:
    with serve(TINY, *ARGUMENTS, *CHUNK, "--indexcache-mode", "live") as client:
        yield client


def test_answers_are_those_of_transformers(tiny: Client, oracle: Oracle) -> None:
    """Trained weights, and documents several times as long as what is selected."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    contexts = [make_context("notes", TASKS["notes"], tokenizer, 480, seed) for seed in range(4)]
    prompts = [context.ids + context.questions[0].ids for context in contexts]
    for pattern in (Pattern.full(12), Pattern("FSSSFSSSFSSS")):
        tiny.switch_pattern(str(pattern))
        for ids, measured in zip(prompts, batch_logprobs(tiny, prompts), strict=True):
            expected = oracle.answer(ids, pattern).logprobs
            torch.testing.assert_close(measured, expected, rtol=0, atol=1e-3)
            is_greedy(oracle, ids, greedy(tiny, ids, 8), pattern)


def test_requests_return_what_their_own_pattern_used(tiny: Client) -> None:
    """They do over chunks, decode steps and a prefix that comes from the cache."""
    ids = prompt(300, 7)
    for text in ("F" * 12, "FSSFSSFSSFSS"):
        first = lists_of(tiny, ids, 6, text)
        check(first, Pattern(text))
        assert (lists_of(tiny, ids, 6, text) == first).all()


def test_one_pass_over_http_finds_what_transformers_lists_give(
    tiny: Client, tmp_path: Path
) -> None:
    marks, options = {"1/2": 6, "1/4": 3}, ("--context", "256", "--batches", "2", "--held-out", "2")
    goals = [word for mark in marks for word in ("--target", mark)]
    arguments = ("search", "run", "--method", "one-pass", "--model", TINY, *options, *goals)
    result = call(*arguments, "--url", tiny.url, "-o", tmp_path)
    assert result.exit_code == 0, words_of(result)
    setup = Setup.read(TINY, context=256, batches=2, held_out=2)
    data, evaluator = setup.calibration, TransformersEvaluator(TINY, setup.calibration)
    matrices, undecided = [], []
    for batch in range(2):
        ids, counted = data.sequences[batch], data.counted[batch]
        margins: list[torch.Tensor] = []
        with _recorded_margins(TOPK, margins, first_of_ties=True):
            lists = torch.cat(evaluator.run(evaluator.own, ids).indices).numpy()
            matrices.append(kept_list(ids, counted, [(0, lists)], 12, TOPK))
        # Where two scores are within rounding at the k-th place, either token is right, and which
        # one is taken differs between processors: a pick of one query in each of these lists.
        may_count = torch.from_numpy(counted)
        open_queries = [int((layer[:-1][may_count] < UNDECIDED).sum()) for layer in margins]
        undecided.append(np.array(open_queries) / (TOPK * counted[TOPK:].sum()))
    journal = [json.loads(line) for line in (tmp_path / "journal.jsonl").open()][1:]
    by_batch = {line["batch"]: line["kept_list"] for line in journal if "kept_list" in line}
    assert sorted(by_batch) == [0, 1]
    for batch, [rows, _] in by_batch.items():
        for layer, row in enumerate(rows):
            apart = np.abs(np.array(row) - matrices[batch][0, layer, :layer])
            assert (apart <= 1e-4 + undecided[batch][layer] + undecided[batch][:layer]).all()
    matrix = np.average(matrices, axis=0, weights=data.batch_tokens[:2])[0]
    for mark, full in marks.items():
        pattern = load_entry(tmp_path / f"tiny-dsa-{mark.replace('/', 'of')}.yaml").pattern
        assert pattern == str(most_similar(matrix, full, Constraints.make(Pattern.full(12))))


def test_an_evaluation_has_the_losses_that_transformers_has(
    tiny: Client, oracle: Oracle, tmp_path: Path
) -> None:
    """So have every arm's, though a context was computed once and its questions were cached."""
    corpus = Corpus(AutoTokenizer.from_pretrained(TINY), PLAN.questions)
    arms = arms_of(TINY, "full", ("uniform:1/4",), "")
    request = EvaluationRequest(TINY, arms, PLAN, corpus, "")
    console = Console(file=io.StringIO())
    record = run_evaluation(request, {"": tiny}, tmp_path, console)
    assert record.finished
    assert record.verified
    planned = {place.context: corpus.make(place) for place in record.planned}
    patterns = {arm.name: Pattern(arm.pattern) for arm in record.arms}
    decided = 0
    for row in record.answers:
        context = planned[row.context]
        [question] = [
            asked_question
            for asked_question in context.questions
            if asked_question.name == row.question
        ]
        ids = context.ids + question.ids + question.answer
        answer = oracle.answer(ids, patterns[row.arm])
        if answer.margin > ROUNDING:
            expected = answer.logprobs[-len(question.answer) :].tolist()
            assert row.logprobs == pytest.approx(expected, abs=1e-3)
            decided += 1
    assert decided > len(record.answers) // 4
    losses = {
        (row.arm, row.repeat, row.context, row.question): row.logprobs for row in record.answers
    }
    for (arm, repeat, context, question), loss in losses.items():
        if repeat or (arm != "full" and planned[context].length <= PLAN.selects_all):
            assert loss == losses["full", 0, context, question]


def test_static_mode(glm: Path, serve: Serve) -> None:
    pattern = "FSSFSS"
    ranks = ("--tp", "2", "--dp", "2", "--enable-dp-attention")
    cores = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"} if (os.cpu_count() or 1) > 1 else {}
    with serve(glm, *ARGUMENTS, *ranks, "--indexcache-pattern", pattern, **cores) as client:
        for seed in range(3):
            check(lists_of(client, prompt(150, seed), 4), Pattern(pattern))
