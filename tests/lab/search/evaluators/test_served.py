"""The evaluator's reading of an engine's answers, with an engine of cardboard."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_indexcache.errors import ServerError
from sglang_indexcache.lab.client.pool import Pool
from sglang_indexcache.lab.search.calibration import Calibration
from sglang_indexcache.lab.search.evaluators import ServedEvaluator, likeliest_kl
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.protocol import PATTERN_OF_REQUEST, RankState
from tests.fakes import state

DATA = Calibration(((1, 2, 3), (4, 5, 6), (7, 8, 9), (3, 2, 1)), "test")


class Cardboard:
    """Token t costs t/10 nats, and one nat more for each S layer."""

    name = "cardboard"

    def __init__(self, ranks: int = 2, mode: str = "live") -> None:
        self.ranks = [state("FFFF", mode, architecture="Cardboard")] * ranks
        self.requests: list[dict[str, Any]] = []
        self.timeouts: list[float | None] = []

    def states(self) -> list[RankState]:
        return self.ranks

    def generate(self, *, timeout: float | None = None, **body: Any) -> Any:
        self.requests.append(body)
        self.timeouts.append(timeout)
        patterns = [
            sampling["custom_params"][PATTERN_OF_REQUEST] for sampling in body["sampling_params"]
        ]
        return [self._reply(*pair, body) for pair in zip(body["input_ids"], patterns, strict=True)]

    def _reply(self, ids: list[int], pattern: str, body: dict[str, Any]) -> dict[str, Any]:
        entries = [[-(t / 10 + pattern.count("S")), t, None] for t in ids]
        entries[0][0] = None
        info = {"prompt_tokens": len(ids), "cached_tokens": 0, PATTERN_OF_REQUEST: [pattern]}
        info |= {"input_token_logprobs": entries}
        if number := body.get("top_logprobs_num"):
            # Token n has 2^-(n+1) under all F, and token 0 a quarter of that under a pattern.
            shared = pattern.count("S") > 0
            chances = [0.5 ** (n + 1 + 2 * (shared and n == 0)) for n in range(number)]
            likely = [[math.log(chance), n, None] for n, chance in enumerate(chances)]
            info["input_top_logprobs"] = [None, *([likely] * (len(ids) - 1))]
        return {"meta_info": info}


def evaluator_of(engine: Cardboard, data: Calibration = DATA, at_once: int = 1) -> ServedEvaluator:
    return ServedEvaluator(Pool([engine], at_once=at_once), data)


def test_means_in_the_order_asked() -> None:
    engine = Cardboard()
    evaluator = evaluator_of(engine)
    losses = evaluator.loss(Pattern("FSFS"), [2, 3, 0, 1])
    assert losses == pytest.approx([0.85 + 2, 0.15 + 2, 0.25 + 2, 0.55 + 2])
    [request] = engine.requests
    assert request["logprob_start_len"] == [0] * 4
    assert len(request["input_ids"]) == 4  # one request, so that ranks share the work
    tokens = evaluator.token_losses(Pattern("FFFF"), [0, 1])
    assert [list(np.round(t, 9)) for t in tokens] == [[0.2, 0.3], [0.5, 0.6]]


def test_changes_are_read_off_the_likeliest_tokens() -> None:
    engine = Cardboard()
    evaluator = evaluator_of(engine)
    [first] = evaluator.changes(Pattern("FSFS"), [2])
    # Tokens 8 and 9 cost 0.8 and 0.9, and two nats more for two S layers.
    assert first.loss == pytest.approx([2.8, 2.9])
    assert first.kept.tolist() == [0, 0]  # token 1 is likelier now
    assert first.right.tolist() == [0, 0]
    asked = [request["input_ids"] for request in engine.requests]
    assert len(asked) == 2  # all F, once, and the pattern
    evaluator.changes(Pattern("FFSS"), [2])
    assert len(engine.requests) == 3
    [alike] = evaluator.changes(Pattern("FFFF"), [2])
    assert alike.kl == pytest.approx([0, 0])
    assert alike.kept.tolist() == [1, 1]
    assert len(engine.requests) == 3, "all F was asked before"


@given(seed=st.integers(0, 10**6), told=st.integers(1, 8))
def test_the_divergence_of_the_likeliest_is_never_more_than_that_of_all(
    seed: int, told: int
) -> None:
    random = np.random.default_rng(seed)
    p, q = (random.dirichlet(np.full(8, 0.5)) + 1e-9 for _ in range(2))
    before, after = (
        {int(n): float(np.log(side[n])) for n in np.argsort(-side)[:told]} for side in (p, q)
    )
    whole = float((p * np.log(p / q)).sum())
    assert -1e-9 <= likeliest_kl(before, after) <= whole + 1e-4
    if told == 8:
        assert likeliest_kl(before, after) == pytest.approx(whole, abs=1e-4)


def test_what_the_engine_serves_to_others_does_not_matter() -> None:
    engine = Cardboard()
    evaluator = evaluator_of(engine)
    alone = evaluator.loss(Pattern("FSFS"), [0])
    engine.ranks = [state("FSSS", "live", architecture="Cardboard", checkpoint_pattern="FFFF")]
    assert list(evaluator.loss(Pattern("FSFS"), [0])) == list(alone)


def test_a_static_engine() -> None:
    with pytest.raises(ServerError, match="--indexcache-mode live"):
        evaluator_of(Cardboard(mode="static"))


def test_the_time_for_a_call_grows_with_its_tokens() -> None:
    """256 batches of 200K tokens take 624 s at 82,000 a second: no fixed 600 s will do."""
    engine = Cardboard()
    long = Calibration(((1,) * 5000, (2,) * 3000), "test")
    evaluator_of(engine, long).loss(Pattern("FFFF"), [0, 1])
    evaluator_of(engine, long, at_once=2).loss(Pattern("FFFF"), [0, 1])
    assert engine.timeouts == [608.0, 1216.0]
