"""SGLang's own CUDA path serves with the plugin: Python of both unmodified, references for kernels.

What the stage computes does not depend on the batch (products are exact before they are rounded),
so "the same answer" means the same bits wherever SGLang takes the same way through its code. Its
longest prompt decides which way through attention a batch takes, so prompts that are asked alone
and together are all longer than the lists.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_indexcache.ask.client import Client
from sglang_indexcache.pattern import Pattern
from tests.oracle import Oracle
from tests.rehearsal.checkpoint import LAYERS
from tests.rehearsal.conftest import Rehearse

QUARTER = "FSSSFS"
PATTERNS = [QUARTER, "F" * LAYERS, "FSFSFS", "FSSSSS"]
LENGTHS = [300, 260, 205, 330]
ANSWER = 6
EAGER = ("--disable-cuda-graph",)
DECODE_GRAPHS = ("--cuda-graph-bs-decode", "1", "2", "4", "--disable-prefill-cuda-graph")

ROUNDING = 0.15
"""Mean difference of log-probabilities from float32's, in nats, that bfloat16 may make.

transformers' own bfloat16 differs from its float32 by 0.07 on this checkpoint beyond the top-k,
and a pattern from another by more than 0.4; that another would be noticed is tested too."""


def prompt(length: int) -> list[int]:
    draw = random.Random(length)
    return [draw.randrange(3, 900) for _ in range(length)]


def parameters(pattern: str | None) -> dict[str, Any]:
    named = {"custom_params": {"indexcache_pattern": pattern}} if pattern else {}
    return {"temperature": 0.0, "max_new_tokens": ANSWER, "ignore_eos": True, **named}


def ask(client: Client, *asked: tuple[int, str | None]) -> list[list[tuple[float, int]]]:
    """The greedy answers to prompts of given lengths and patterns, as one request."""
    replies = client.generate(
        input_ids=[prompt(length) for length, _ in asked],
        sampling_params=[parameters(pattern) for _, pattern in asked],
        return_logprob=True,
    )
    return [
        [(logprob, token) for logprob, token, *_ in one["meta_info"]["output_token_logprobs"]]
        for one in replies
    ]


def apart(oracle: Oracle, answer: list[tuple[float, int]], length: int, pattern: str) -> float:
    """The mean difference of an answer's log-probabilities from transformers' under a pattern."""
    logprobs, tokens = zip(*answer, strict=True)
    expected = oracle.answer([*prompt(length), *tokens], Pattern(pattern)).logprobs[-ANSWER:]
    return float((torch.tensor(logprobs) - expected).abs().mean())


@pytest.fixture(scope="module")
def oracle(model: Path) -> Oracle:
    return Oracle(model, torch.float32, fp8_indexer=True)


class TestLive:
    """Every layer keeps its indexer; each request brings its pattern."""

    @pytest.fixture(scope="class")
    def client(self, rehearse: Rehearse) -> Iterator[Client]:
        flags = ("--indexcache-mode", "live", "--indexcache-pattern", QUARTER)
        with rehearse(*EAGER, *flags) as client:
            yield client

    @pytest.fixture(scope="class")
    def alone(self, client: Client) -> list[list[tuple[float, int]]]:
        asked = zip(LENGTHS, PATTERNS, strict=True)
        return [ask(client, one)[0] for one in asked]

    def test_patterns_mixed_in_a_batch_answer_as_alone_to_the_bit(
        self, client: Client, alone: list[Any]
    ) -> None:
        client.flush_cache()
        assert ask(client, *zip(LENGTHS, PATTERNS, strict=True)) == alone

    def test_a_prefix_is_shared_between_requests_of_one_pattern_only(
        self, client: Client, alone: list[Any]
    ) -> None:
        client.flush_cache()
        same = [ask(client, (LENGTHS[0], PATTERNS[0]))[0] for _ in range(2)]
        assert same == [alone[0]] * 2
        other = ask(client, (LENGTHS[0], "FSSSSS"))[0]
        client.flush_cache()
        assert ask(client, (LENGTHS[0], "FSSSSS"))[0] == other

    @pytest.mark.parametrize("case", range(4))
    def test_answers_are_those_of_transformers(
        self, oracle: Oracle, alone: list[Any], case: int
    ) -> None:
        assert apart(oracle, alone[case], LENGTHS[case], PATTERNS[case]) < ROUNDING

    def test_another_pattern_would_be_noticed(self, oracle: Oracle, alone: list[Any]) -> None:
        far = [apart(oracle, alone[case], LENGTHS[case], PATTERNS[case - 1]) for case in range(4)]
        assert sum(far) / 4 > 2 * ROUNDING


class TestStatic:
    """SGLang builds no indexer on S layers, and decodes from CUDA graphs."""

    @pytest.fixture(scope="class")
    def client(self, rehearse: Rehearse) -> Iterator[Client]:
        with rehearse(*DECODE_GRAPHS, "--indexcache-pattern", QUARTER) as client:
            yield client

    @pytest.fixture(scope="class")
    def answers(self, client: Client) -> list[Any]:
        return ask(client, *((length, None) for length in LENGTHS))

    def test_answers_are_those_of_transformers(self, oracle: Oracle, answers: list[Any]) -> None:
        for length, answer in zip(LENGTHS, answers, strict=True):
            assert apart(oracle, answer, length, QUARTER) < ROUNDING

    def test_shared_layers_ran_no_indexer(self, client: Client, answers: list[Any]) -> None:
        state = client.server_info()["internal_states"][0]["indexcache"]
        ran = [runs > 0 for runs in state["indexer_selections"]]
        assert ran == [kind == "F" for kind in QUARTER]

    def test_stock_with_the_same_sharing_answers_the_same_bits(
        self, rehearse: Rehearse, answers: list[Any]
    ) -> None:
        kinds = ["full" if kind == "F" else "shared" for kind in QUARTER]
        override = ("--json-model-override-args", json.dumps({"indexer_types": kinds}))
        with rehearse(*DECODE_GRAPHS, *override, backend="dsa") as stock:
            assert ask(stock, *((length, None) for length in LENGTHS)) == answers


class TestAttentionTensorParallelism:
    """Ranks that share heads: SGLang pads a prefill's rows to their number."""

    @pytest.fixture(scope="class")
    def client(self, rehearse: Rehearse) -> Iterator[Client]:
        ranks = ("--tp", "4", "--dp", "2", "--enable-dp-attention")
        flags = ("--indexcache-mode", "live", "--indexcache-pattern", QUARTER)
        with rehearse(*EAGER, *ranks, *flags, cards=4) as client:
            yield client

    def test_odd_batches_of_mixed_patterns_answer_as_transformers(
        self, client: Client, oracle: Oracle
    ) -> None:
        lengths = [301, 263, 207, 333]
        answers = ask(client, *zip(lengths, PATTERNS, strict=True))
        for length, pattern, answer in zip(lengths, PATTERNS, answers, strict=True):
            assert apart(oracle, answer, length, pattern) < ROUNDING
