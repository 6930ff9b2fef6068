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
from tests.rehearsal.conftest import Models, Rehearse

QUARTER = "FSSSFS"
PATTERNS = [QUARTER, "F" * LAYERS, "FSFSFS", "FSSSSS"]
LENGTHS = [300, 260, 205, 330]
ANSWER = 6
EAGER = ("--disable-cuda-graph",)
DECODE_GRAPHS = ("--cuda-graph-bs-decode", "1", "2", "4", "--disable-prefill-cuda-graph")


def prompt(length: int) -> list[int]:
    draw = random.Random(length)
    return [draw.randrange(3, 900) for _ in range(length)]


def parameters(pattern: str | None, tokens: int = ANSWER) -> dict[str, Any]:
    named = {"custom_params": {"indexcache_pattern": pattern}} if pattern else {}
    return {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True, **named}


def ask(
    client: Client, *asked: tuple[int, str | None], tokens: int = ANSWER
) -> list[list[tuple[float, int]]]:
    """The greedy answers to prompts of given lengths and patterns, as one request."""
    replies = client.generate(
        input_ids=[prompt(length) for length, _ in asked],
        sampling_params=[parameters(pattern, tokens) for _, pattern in asked],
        return_logprob=True,
    )
    return [
        [(logprob, token) for logprob, token, *_ in one["meta_info"]["output_token_logprobs"]]
        for one in replies
    ]


def prompt_logprobs(client: Client, length: int, pattern: str | None) -> torch.Tensor:
    """``[length - 1]`` log-probabilities of a prompt's tokens, the first left out."""
    reply = client.generate(
        input_ids=prompt(length),
        sampling_params=parameters(pattern),
        return_logprob=True,
        logprob_start_len=0,
    )
    told = reply["meta_info"]["input_token_logprobs"][1:]
    return torch.tensor([logprob for logprob, *_ in told])


class Judge:
    """transformers in float32 with the indexer's FP8, and how far its own bfloat16 is from that."""

    def __init__(self, model: Path) -> None:
        self._exact = Oracle(model, torch.float32, fp8_indexer=True)
        self._rounded = Oracle(model, torch.bfloat16, fp8_indexer=True)

    def apart(self, got: torch.Tensor, tokens: list[int], pattern: str) -> float:
        """The mean difference of log-probabilities of the last tokens from float32's, in nats."""
        exact = self._exact.answer(tokens, Pattern(pattern)).logprobs[-len(got) :]
        return float((got - exact).abs().mean())

    def bound(self, count: int, tokens: list[int], pattern: str) -> float:
        """Twice what transformers' own bfloat16 is apart: SGLang rounds at other places."""
        rounded = self._rounded.answer(tokens, Pattern(pattern)).logprobs[-count:]
        return 2 * self.apart(rounded, tokens, pattern)

    def check(self, got: torch.Tensor, tokens: list[int], pattern: str) -> None:
        """``got``: ``[n]`` log-probabilities of the last ``n`` tokens, as SGLang told them."""
        assert self.apart(got, tokens, pattern) < self.bound(len(got), tokens, pattern)

    def answers_apart(
        self, asked: list[tuple[int, str]], answers: list[Any]
    ) -> tuple[float, float]:
        """How far answers are from one forward over prompt and answer, and the bound of that.

        One answer is a few tokens, so they are judged together.
        """
        apart = bound = 0.0
        for (length, pattern), answer in zip(asked, answers, strict=True):
            tokens = prompt(length) + [token for _, token in answer]
            got = torch.tensor([logprob for logprob, _ in answer])
            apart += self.apart(got, tokens, pattern)
            bound += self.bound(len(got), tokens, pattern)
        return apart, bound


@pytest.fixture(scope="module")
def judge(models: Models) -> Judge:
    return Judge(models("glm-5"))


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
    def test_prompts_are_read_as_by_transformers_and_under_no_other_pattern(
        self, client: Client, judge: Judge, case: int
    ) -> None:
        length, pattern = LENGTHS[case], PATTERNS[case]
        got = prompt_logprobs(client, length, pattern)
        judge.check(got, prompt(length), pattern)
        other = judge.apart(got, prompt(length), PATTERNS[case - 1])
        assert other > judge.bound(len(got), prompt(length), pattern)


class TestStatic:
    """SGLang builds no indexer on S layers, and decodes from CUDA graphs."""

    @pytest.fixture(scope="class")
    def client(self, rehearse: Rehearse) -> Iterator[Client]:
        with rehearse(*DECODE_GRAPHS, "--indexcache-pattern", QUARTER) as client:
            yield client

    @pytest.fixture(scope="class")
    def answers(self, client: Client) -> list[Any]:
        return ask(client, *((length, None) for length in LENGTHS))

    def test_prompts_are_read_as_by_transformers(self, client: Client, judge: Judge) -> None:
        for length in LENGTHS:
            judge.check(prompt_logprobs(client, length, None), prompt(length), QUARTER)

    def test_answers_are_those_of_transformers(self, judge: Judge, answers: list[Any]) -> None:
        apart, bound = judge.answers_apart([(length, QUARTER) for length in LENGTHS], answers)
        assert apart < bound

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


class TestWindow:
    """S layers see the last 8 tokens besides their list, in prefill and in decode graphs."""

    WINDOW = f"{QUARTER}+w8"

    @pytest.fixture(scope="class")
    def client(self, rehearse: Rehearse) -> Iterator[Client]:
        with rehearse(*DECODE_GRAPHS, "--indexcache-pattern", self.WINDOW) as client:
            yield client

    def test_prompts_are_read_as_by_transformers_and_not_as_without(
        self, client: Client, judge: Judge
    ) -> None:
        nearer = 0.0
        for length in LENGTHS:
            got, tokens = prompt_logprobs(client, length, None), prompt(length)
            judge.check(got, tokens, self.WINDOW)
            nearer += judge.apart(got, tokens, QUARTER) - judge.apart(got, tokens, self.WINDOW)
        assert nearer > 0

    def test_answers_from_graphs_are_those_of_transformers(
        self, client: Client, judge: Judge
    ) -> None:
        answers = ask(client, *((length, None) for length in LENGTHS), tokens=12)
        apart, bound = judge.answers_apart([(length, self.WINDOW) for length in LENGTHS], answers)
        assert apart < bound
