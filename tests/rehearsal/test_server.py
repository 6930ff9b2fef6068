"""SGLang's own CUDA path serves with the plugin: Python of both unmodified, references for kernels.

What the stage computes does not depend on the batch (products are exact before they are rounded),
so "the same answer" means the same bits wherever SGLang takes the same way through its code. Its
longest prompt decides which way through attention a batch takes, so prompts that are asked alone
and together are all longer than the lists.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from sglang_indexcache.lab.client.http import Client
from tests.rehearsal import evidence
from tests.rehearsal.conftest import Judges, Models, Rehearse
from tests.rehearsal.questions import (
    DECODE_GRAPHS,
    EAGER,
    LENGTHS,
    PATTERNS,
    QUARTER,
    Judge,
    alone_and_together,
    ask,
    behind_another_pattern_and_first,
    logprobs,
    prompt,
)

TP_2 = ("--tp", "2")


@pytest.fixture
def judge(judges: Judges) -> Judge:
    return judges("glm-5")


class TestLive:
    """Every layer keeps its indexer; each request brings its pattern."""

    @pytest.fixture(scope="class")
    def client(self, rehearse: Rehearse) -> Iterator[Client]:
        flags = ("--indexcache-mode", "live", "--indexcache-pattern", QUARTER)
        with rehearse(*EAGER, *flags) as client:
            yield client

    @pytest.fixture(scope="class")
    def alone(self, client: Client) -> list[list[tuple[float, int]]]:
        prompts_asked = zip(LENGTHS, PATTERNS, strict=True)
        return [ask(client, single)[0] for single in prompts_asked]

    def test_patterns_mixed_in_a_batch_answer_as_alone_to_the_bit(
        self, client: Client, alone: list[Any]
    ) -> None:
        client.flush_cache()
        assert ask(client, *zip(LENGTHS, PATTERNS, strict=True)) == alone

    def test_a_prefix_is_shared_between_requests_of_one_pattern_only(
        self, client: Client, alone: list[Any]
    ) -> None:
        client.flush_cache()
        answers = [ask(client, (LENGTHS[0], PATTERNS[0]))[0] for _ in range(2)]
        assert answers == [alone[0]] * 2
        behind, first = behind_another_pattern_and_first(client)
        assert behind == first

    def test_shared_layers_store_their_keys_and_select_nothing(
        self, client: Client, alone: list[Any]
    ) -> None:
        """Keys that an indexer would write, it writes itself and are not counted."""

        def state() -> dict[str, list[int]]:
            [rank] = client.server_info()["internal_states"]
            return dict(rank["indexcache"])

        client.flush_cache()
        before = state()
        assert ask(client, (LENGTHS[0], PATTERNS[0]))[0] == alone[0]
        after = state()
        for layer, kind in enumerate(PATTERNS[0]):
            counts = [
                after[name][layer] - before[name][layer] > 0
                for name in ("indexer_selections", "index_key_writes")
            ]
            assert counts == ([True, False] if kind == "F" else [False, True])

    @pytest.mark.parametrize("case", range(4))
    def test_prompts_are_read_as_by_transformers_and_under_no_other_pattern(
        self, client: Client, judge: Judge, case: int
    ) -> None:
        length, pattern = LENGTHS[case], PATTERNS[case]
        measured = logprobs(client, prompt(length), pattern)
        judge.check(measured, prompt(length), pattern)
        elsewhere = judge.apart(measured, prompt(length), PATTERNS[case - 1])
        assert elsewhere > judge.bound(len(measured), prompt(length), pattern)


class TestStatic:
    """No indexer is built on S layers, two ranks split rows and decode from CUDA graphs."""

    ASKED = tuple((length, None) for length in LENGTHS)

    @pytest.fixture(scope="class")
    def client(self, rehearse: Rehearse) -> Iterator[Client]:
        flags = (*TP_2, *DECODE_GRAPHS, "--enable-metrics", "--indexcache-pattern", QUARTER)
        flags += ("--indexcache-split-rows", "on")
        with rehearse(*flags) as client:
            yield client

    @pytest.fixture(scope="class")
    def answers(self, client: Client) -> list[Any]:
        """Answers of one batch, which are the same bits alone."""
        alone, together = alone_and_together(client, self.ASKED)
        assert alone == together
        return together

    def test_prompts_are_read_as_by_transformers(self, client: Client, judge: Judge) -> None:
        for length in LENGTHS[::2]:
            judge.check(logprobs(client, prompt(length), None), prompt(length), QUARTER)

    def test_answers_are_those_of_transformers(self, judge: Judge, answers: list[Any]) -> None:
        apart, bound = judge.answers_apart([(length, QUARTER) for length in LENGTHS], answers)
        assert apart < bound

    def test_graphs_were_replayed(self, client: Client, models: Models, answers: list[Any]) -> None:
        evidence.replays("decode_cuda_graph")(client, models("glm-5"))

    def test_rows_were_split(self, client: Client, models: Models, answers: list[Any]) -> None:
        evidence.split_rows(client, models("glm-5"))

    def test_shared_layers_ran_no_indexer(self, client: Client, answers: list[Any]) -> None:
        [state] = [rank["indexcache"] for rank in client.server_info()["internal_states"]]
        has_run = [runs > 0 for runs in state["indexer_selections"]]
        assert has_run == [kind == "F" for kind in QUARTER]

    @pytest.mark.matrix
    def test_stock_with_the_same_sharing_answers_the_same_bits(
        self, rehearse: Rehearse, answers: list[Any]
    ) -> None:
        kinds = ["full" if kind == "F" else "shared" for kind in QUARTER]
        override = ("--json-model-override-args", json.dumps({"indexer_types": kinds}))
        with rehearse(*TP_2, *DECODE_GRAPHS, *override, backend="dsa") as stock:
            assert ask(stock, *self.ASKED) == answers
