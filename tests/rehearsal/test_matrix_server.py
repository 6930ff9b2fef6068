"""One server for each feature that needs a card, each asked the same.

Alone or in a batch, an answer is the same bits; prompts and answers are those of transformers; and
a layer that is S in every pattern ran no indexer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from sglang_indexcache.ask.client import Client
from sglang_indexcache.pattern import Pattern
from tests.rehearsal.conftest import Judges, Rehearse
from tests.rehearsal.questions import (
    DECODE,
    DECODE_GRAPHS,
    EAGER,
    LENGTHS,
    PATTERNS,
    QUARTER,
    alone_and_together,
    prompt,
    prompt_logprobs,
)

LIVE = ("--indexcache-mode", "live")
TP_2 = ("--tp", "2")
FP8_KV = ("--kv-cache-dtype", "fp8_e4m3")
PREFILL_GRAPHS = (
    "--cuda-graph-backend-prefill",
    "breakable",
    "--cuda-graph-bs-prefill",
    "352",
    "1120",
)
MTP = (
    *("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "2"),
    *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "3"),
    *("--speculative-draft-attention-backend", "indexcache"),
)
DP_2 = (*TP_2, "--dp", "2", "--enable-dp-attention")


@dataclass(frozen=True)
class Case:
    """A server.

    Attributes:
        name: what it rehearses.
        flags: beside the pattern's.
        cards: how many ranks it has.
        family: of its checkpoint.
        rehearses: features of SGLang, by their names in ``serving.features``.
        same_chunks: whether a prompt is cut alike alone and in a batch. Where a chunk ends decides
            which of SGLang's two ways through attention its rows take, and they round differently.
        answers_judged: whether answers are held to the bound, not only prompts. DeepSeek-V3.2's
            noise is far from tame: transformers' own bfloat16 is 0.2 nats from float32, and six
            tokens an answer do not average that.
        in_every_run: whether ``make test`` runs it too, not only ``make rehearse``.
    """

    name: str
    flags: tuple[str, ...]
    cards: int = 1
    family: str = "glm-5"
    rehearses: tuple[str, ...] = ()
    same_chunks: bool = True
    answers_judged: bool = True
    in_every_run: bool = False

    @property
    def is_live(self) -> bool:
        """Whether each request brings its pattern."""
        return set(LIVE) <= set(self.flags)

    @property
    def patterns(self) -> list[str]:
        """Under which the requests are answered."""
        return list(PATTERNS) if self.is_live else [QUARTER] * len(LENGTHS)

    @property
    def asked(self) -> list[tuple[int, str | None]]:
        """The requests' lengths, and the patterns that they name."""
        named = self.patterns if self.is_live else [None] * len(LENGTHS)
        return list(zip(LENGTHS, named, strict=True))


CASES = [
    Case(
        "tensor parallelism",
        (*TP_2, *DECODE_GRAPHS),
        cards=2,
        rehearses=("tensor parallelism", "CUDA graphs"),
        in_every_run=True,
    ),
    Case("dp_attention", (*LIVE, *DP_2, *EAGER), cards=2, rehearses=("dp_attention",)),
    Case("dp_attention with graphs", (*DP_2, *DECODE_GRAPHS), cards=2, rehearses=("dp_attention",)),
    Case(
        "chunked prefill",
        (*LIVE, *EAGER, "--chunked-prefill-size", "128"),
        rehearses=("chunked prefill",),
        same_chunks=False,
    ),
    Case("prefill graphs", (*DECODE, *PREFILL_GRAPHS), rehearses=("CUDA graphs",)),
    Case("MTP", (*DECODE_GRAPHS, *MTP), family="glm-5-mtp", rehearses=("MTP / EAGLE",)),
    Case(
        "graphs of patterns",
        (*LIVE, *DECODE_GRAPHS, "--indexcache-graphs", f"{QUARTER},FFFFFF"),
        rehearses=("CUDA graphs",),
    ),
    Case(
        "pipeline parallelism",
        ("--pp-size", "2", *DECODE_GRAPHS),
        cards=2,
        rehearses=("pipeline parallelism",),
    ),
    Case("FP8 KV cache", (*LIVE, *EAGER, *FP8_KV), rehearses=("FP8 KV cache",)),
    Case(
        "FP8 weights",
        (*DECODE_GRAPHS, *FP8_KV),
        family="glm-5-fp8",
        rehearses=("FP8 weights", "FP8 KV cache"),
    ),
    Case("DeepSeek-V3.2", (*LIVE, *EAGER), family="deepseek-v3.2", answers_judged=False),
]
IN_TEST_SERVER = {"radix cache", "overlap schedule"}
"""Rehearsed by ``test_server.py``: prefixes there, and the schedule that SGLang has by default."""


def _parameter(case: Case) -> Any:
    marks = () if case.in_every_run else (pytest.mark.matrix,)
    return pytest.param(case, marks=marks, id=case.name.replace(" ", "_"))


@pytest.fixture(scope="module", params=map(_parameter, CASES))
def case(request: pytest.FixtureRequest) -> Case:
    chosen: Case = request.param
    return chosen


@pytest.fixture(scope="module")
def client(case: Case, rehearse: Rehearse) -> Iterator[Client]:
    given = ("--indexcache-pattern", QUARTER, *case.flags)
    with rehearse(*given, cards=case.cards, family=case.family) as client:
        yield client


@pytest.fixture(scope="module")
def answers(case: Case, client: Client) -> tuple[list[Any], list[Any]]:
    return alone_and_together(client, case.asked)


def tokens(answers: list[Any]) -> list[list[int]]:
    return [[token for _, token in answer] for answer in answers]


def test_an_answer_alone_is_the_same_bits(case: Case, answers: tuple[list[Any], list[Any]]) -> None:
    alone, together = answers
    assert alone == together if case.same_chunks else tokens(alone) == tokens(together)


def test_prompts_and_answers_are_those_of_transformers(
    case: Case, client: Client, judges: Judges, answers: tuple[list[Any], list[Any]]
) -> None:
    judge = judges(case.family, set(FP8_KV) <= set(case.flags))
    length, named = case.asked[-1]
    judge.check(prompt_logprobs(client, length, named), prompt(length), case.patterns[-1])
    if case.answers_judged:
        under = list(zip(LENGTHS, case.patterns, strict=True))
        apart, bound = judge.answers_apart(under, answers[1])
        assert apart < bound


def test_layers_that_are_shared_in_every_pattern_ran_no_indexer(
    case: Case, client: Client, answers: tuple[list[Any], list[Any]]
) -> None:
    full = {layer for pattern in case.patterns for layer in Pattern(pattern).full_layers}
    ran: set[int] = set()
    for state in client.server_info()["internal_states"]:
        runs = state["indexcache"]["indexer_selections"]
        ran |= {layer for layer, count in enumerate(runs) if count}
        if "--indexcache-graphs" in case.flags:
            assert any(state["indexcache"]["graph_replays"].values())
    assert ran
    assert ran <= full
