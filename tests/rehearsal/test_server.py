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

from sglang_indexcache.ask.client import Client
from sglang_indexcache.library import Slopes
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
from tests.slopes import random_slopes

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
    """SGLang builds no indexer on S layers, and two ranks decode from CUDA graphs."""

    ASKED = tuple((length, None) for length in LENGTHS)

    @pytest.fixture(scope="class")
    def client(self, rehearse: Rehearse) -> Iterator[Client]:
        flags = (*TP_2, *DECODE_GRAPHS, "--enable-metrics", "--indexcache-pattern", QUARTER)
        with rehearse(*flags) as client:
            yield client

    @pytest.fixture(scope="class")
    def answers(self, client: Client) -> list[Any]:
        """Answers of one batch, which are the same bits alone."""
        alone, together = alone_and_together(client, self.ASKED)
        assert alone == together
        return together

    def test_prompts_are_read_as_by_transformers(self, client: Client, judge: Judge) -> None:
        for length in LENGTHS:
            judge.check(logprobs(client, prompt(length), None), prompt(length), QUARTER)

    def test_answers_are_those_of_transformers(self, judge: Judge, answers: list[Any]) -> None:
        apart, bound = judge.answers_apart([(length, QUARTER) for length in LENGTHS], answers)
        assert apart < bound

    def test_graphs_were_replayed(self, client: Client, models: Models, answers: list[Any]) -> None:
        evidence.replays("decode_cuda_graph")(client, models("glm-5"))

    def test_shared_layers_ran_no_indexer(self, client: Client, answers: list[Any]) -> None:
        [state] = [rank["indexcache"] for rank in client.server_info()["internal_states"]]
        has_run = [runs > 0 for runs in state["indexer_selections"]]
        assert has_run == [kind == "F" for kind in QUARTER]

    def test_stock_with_the_same_sharing_answers_the_same_bits(
        self, rehearse: Rehearse, answers: list[Any]
    ) -> None:
        kinds = ["full" if kind == "F" else "shared" for kind in QUARTER]
        override = ("--json-model-override-args", json.dumps({"indexer_types": kinds}))
        with rehearse(*TP_2, *DECODE_GRAPHS, *override, backend="dsa") as stock:
            assert ask(stock, *self.ASKED) == answers


class Folding:
    """A server whose layers fold as ``LETTERS`` say, by random slopes."""

    LETTERS: str

    @pytest.fixture(scope="class")
    def slopes(self, models: Models, tmp_path_factory: pytest.TempPathFactory) -> Slopes:
        return random_slopes(models("glm-5"), tmp_path_factory.mktemp("slopes") / "any.slopes")

    @pytest.fixture(scope="class")
    def client(self, rehearse: Rehearse, slopes: Slopes) -> Iterator[Client]:
        folds = f"{self.LETTERS}@{slopes.path}"
        with rehearse(*DECODE_GRAPHS, "--indexcache-pattern", folds) as client:
            yield client


class TestFolded(Folding):
    """L layers select by one folded query, in prefill, decode graphs and beside F and S layers."""

    LETTERS = "FLSLLS"

    @pytest.fixture(scope="class")
    def pattern(self, slopes: Slopes) -> str:
        return f"{self.LETTERS}@{slopes.digest}"

    def test_prompts_and_answers_are_those_of_transformers_folded(
        self, client: Client, models: Models, slopes: Slopes, pattern: str
    ) -> None:
        judge = Judge(models("glm-5"), slopes=slopes.by_layer)
        prompts_asked = [(length, None) for length in LENGTHS]
        answers = ask(client, *prompts_asked)
        assert [ask(client, single)[0] for single in prompts_asked] == answers
        for length in LENGTHS:
            measured = logprobs(client, prompt(length), None)
            judge.check(measured, prompt(length), pattern)
            unfolded = pattern.replace("L", "F").partition("@")[0]
            assert judge.apart(measured, prompt(length), unfolded) > judge.bound(
                len(measured), prompt(length), pattern
            )
        apart, bound = judge.answers_apart([(length, pattern) for length in LENGTHS], answers)
        assert apart < bound

    def test_every_prefill_of_an_l_layer_was_scored_by_the_product(
        self, client: Client, pattern: str
    ) -> None:
        """DeepGEMM's logits are those of the F layer; the server counts the pairs of the others."""
        state = client.server_info()["internal_states"][0]["indexcache"]
        has_run = [runs > 0 for runs in state["indexer_selections"]]
        assert has_run == [kind != "S" for kind in self.LETTERS]
        assert sum(count for name, count in state["pairs"].items() if "folded" in name) > 0


@pytest.mark.matrix
class TestCandidates(Folding):
    """F layers fold, too, and score their candidates again; short prompts have as many tokens."""

    LETTERS = "FSLFLS+c2"
    PROMPTS = (205, 500)

    def test_prompts_and_answers_are_those_of_transformers_folded(
        self, client: Client, models: Models, slopes: Slopes
    ) -> None:
        judge = Judge(models("glm-5"), slopes=slopes.by_layer)
        pattern = f"{self.LETTERS}@{slopes.digest}"
        alone, together = alone_and_together(client, [(length, None) for length in self.PROMPTS])
        assert alone == together
        apart, bound = judge.answers_apart([(length, pattern) for length in self.PROMPTS], together)
        assert apart < bound
        for length in self.PROMPTS:
            measured = logprobs(client, prompt(length), None)
            judge.check(measured, prompt(length), pattern)
            # As if the candidates were the selection, and as if there were none.
            others = f"LSLLLS@{slopes.digest}", f"FSLFLS@{slopes.digest}"
            apart = [judge.apart(measured, prompt(length), each) for each in (pattern, *others)]
            assert apart[0] == min(apart)
            assert apart[1] > judge.bound(len(measured), prompt(length), pattern)
