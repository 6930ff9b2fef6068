"""One server for each feature that needs a card: mixed or alone, an answer is the same bits.

Each case is asked the same: prompts that read as transformers reads them, answers alone that equal
those of the batch, and layers that are S in every pattern without a single run of an indexer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from sglang_indexcache.ask.client import Client
from tests.rehearsal.conftest import Models, Rehearse
from tests.rehearsal.test_server import (
    DECODE_GRAPHS,
    EAGER,
    LENGTHS,
    PATTERNS,
    QUARTER,
    Judge,
    ask,
    prompt_logprobs,
)

TP_2 = ("--tp", "2")
DP_2 = (*TP_2, "--dp", "2", "--enable-dp-attention")
LIVE = ("--indexcache-mode", "live")


@dataclass(frozen=True)
class Case:
    """A server.

    Attributes:
        features: of ``serving.features``, by name, which this rehearses.
        flags: beside the pattern's.
        cards: how many ranks it has.
        family: of its checkpoint.
    """

    features: tuple[str, ...]
    flags: tuple[str, ...]
    cards: int = 1
    family: str = "glm-5"

    @property
    def patterns(self) -> list[str | None]:
        """Of the four requests: each its own in live mode, the server's in static mode."""
        return list(PATTERNS) if set(LIVE) <= set(self.flags) else [None] * len(LENGTHS)

    def __str__(self) -> str:
        kind = "live" if set(LIVE) <= set(self.flags) else "static"
        graphs = "graphs" if set(DECODE_GRAPHS) <= set(self.flags) else "eager"
        return "-".join((kind, graphs, *self.features, self.family)).replace(" ", "_")


CASES = [
    Case(("tensor parallelism", "CUDA graphs"), (*TP_2, *DECODE_GRAPHS), cards=2),
    Case(("dp_attention",), (*LIVE, *DP_2, *EAGER), cards=2),
    Case(("dp_attention", "CUDA graphs"), (*DP_2, *DECODE_GRAPHS), cards=2),
    Case(("chunked prefill",), (*LIVE, *EAGER, "--chunked-prefill-size", "128")),
    Case(("pipeline parallelism",), ("--pp-size", "2", *EAGER), cards=2),
    Case((), (*LIVE, *EAGER), family="deepseek-v3.2"),
]


@pytest.fixture(scope="module", params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    chosen: Case = request.param
    return chosen


@pytest.fixture(scope="module")
def client(case: Case, rehearse: Rehearse) -> Iterator[Client]:
    flags = ("--indexcache-pattern", QUARTER, *case.flags)
    with rehearse(*flags, cards=case.cards, family=case.family) as client:
        yield client


@pytest.fixture(scope="module")
def together(case: Case, client: Client) -> list[Any]:
    return ask(client, *zip(LENGTHS, case.patterns, strict=True))


def test_an_answer_alone_is_the_same_bits(case: Case, client: Client, together: list[Any]) -> None:
    client.flush_cache()
    asked = zip(LENGTHS, case.patterns, strict=True)
    assert [ask(client, one)[0] for one in asked] == together


def test_a_prompt_is_read_as_by_transformers(case: Case, client: Client, models: Models) -> None:
    pattern = case.patterns[-1]
    got = prompt_logprobs(client, LENGTHS[-1], pattern)
    judge = Judge(models(case.family))
    read_under = pattern or QUARTER
    assert judge.apart(got, LENGTHS[-1], read_under) < judge.bound(LENGTHS[-1], read_under)


def test_layers_shared_by_every_pattern_ran_no_indexer(
    case: Case, client: Client, together: list[Any]
) -> None:
    patterns = [pattern or QUARTER for pattern in case.patterns]
    used = [any(kinds) for kinds in zip(*([k == "F" for k in p] for p in patterns), strict=True)]
    for state in client.server_info()["internal_states"]:
        ran = [runs > 0 for runs in state["indexcache"]["indexer_selections"]]
        assert all(wanted or not did for wanted, did in zip(used, ran, strict=True))
    assert any(ran)
