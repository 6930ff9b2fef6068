"""What the evaluator does with an engine's answers, with an engine of cardboard."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sglang_indexcache.ask.protocol import RankState
from sglang_indexcache.errors import SearchError, ServerError
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.calibration import Calibration
from sglang_indexcache.search.evaluators.pool import ServerPool
from sglang_indexcache.search.evaluators.served import ServedEvaluator
from tests.fakes import state

DATA = Calibration(((1, 2, 3), (4, 5, 6), (7, 8, 9), (3, 2, 1)), 2, "test")


class Cardboard:
    """Token t costs t/10 nats, and one nat more for each S layer."""

    def __init__(self, ranks: int = 2, mode: str = "live") -> None:
        self.ranks = [state("FFFF", mode, architecture="Cardboard")] * ranks
        self.cached, self.lost = 0, 0
        self.told: list[str] | str | None = "what was asked"
        self.requests: list[dict[str, Any]] = []
        self.timeouts: list[float | None] = []
        self.url = "cardboard"

    def states(self) -> list[RankState]:
        return self.ranks

    def generate(self, *, timeout: float | None = None, **body: Any) -> Any:
        self.requests.append(body)
        self.timeouts.append(timeout)
        pattern = body["sampling_params"]["custom_params"]["indexcache_pattern"]
        replies = [self._reply(ids, pattern.count("S")) for ids in body["input_ids"]]
        told = [pattern] if self.told == "what was asked" else self.told
        for reply in replies:
            reply["meta_info"] |= {} if told is None else {"indexcache_pattern": told}
        return replies

    def _reply(self, ids: list[int], shared: int) -> dict[str, Any]:
        entries = [[-(t / 10 + shared), t, None] for t in ids]
        entries[0][0] = None
        count = len(entries) - self.lost
        return {
            "meta_info": {"input_token_logprobs": entries[:count], "cached_tokens": self.cached}
        }


def test_means_per_batch_in_the_order_asked() -> None:
    engine = Cardboard()
    evaluator = ServedEvaluator(engine, DATA)
    found = evaluator.loss(Pattern("FSFS"), [1, 0])
    assert found.values == pytest.approx([(0.8 + 0.9 + 0.2 + 0.1) / 4 + 2, (0.5 + 1.1) / 4 + 2])
    assert found.layer_tokens == 4 * 12
    [request] = engine.requests
    assert request["logprob_start_len"] == 0
    assert len(request["input_ids"]) == 4  # one request, so that ranks share the work
    tokens = evaluator.token_losses(Pattern("FFFF"), [0])
    assert [list(np.round(t, 9)) for t in tokens[0]] == [[0.2, 0.3], [0.5, 0.6]]


def test_only_what_counts_is_in_the_loss_at_every_length() -> None:
    masks = tuple(np.array(m) for m in ([True, False], [True], [False, False], [False, True]))
    data = Calibration(((1, 2, 3), (4, 5), (7, 8, 9), (3, 2, 1)), 2, "test", counted=masks)
    found = ServedEvaluator(Cardboard(), data).loss(Pattern("FFFF"), [0, 1])
    assert found.values == pytest.approx([(0.2 + 0.5) / 2, 0.1])


def test_what_the_engine_serves_to_others_does_not_matter() -> None:
    engine = Cardboard()
    evaluator = ServedEvaluator(engine, DATA)
    alone = evaluator.loss(Pattern("FSFS"), [0]).values
    engine.ranks = [state("FSSS", "live", architecture="Cardboard", checkpoint_pattern="FFFF")]
    assert list(evaluator.loss(Pattern("FSFS"), [0]).values) == list(alone)


@pytest.mark.parametrize(
    ("told", "said"), [(["FFFF"], "under FFFF"), (None, "without saying under which pattern")]
)
def test_an_answer_under_another_pattern_is_refused(told: Any, said: str) -> None:
    engine = Cardboard()
    engine.told = told
    with pytest.raises(ServerError, match=f"asked for pattern FSFS and answered {said}"):
        ServedEvaluator(engine, DATA).loss(Pattern("FSFS"), [0])


def test_cached_state_is_refused() -> None:
    engine = Cardboard()
    engine.cached = 2
    with pytest.raises(SearchError, match=r"from its cache .2 tokens.*--disable-radix-cache"):
        ServedEvaluator(engine, DATA).loss(Pattern("FFFF"), [0])


def test_a_cut_answer_is_refused() -> None:
    engine = Cardboard()
    engine.lost = 1
    with pytest.raises(SearchError, match="scored 1 tokens of a 3-token sequence"):
        ServedEvaluator(engine, DATA).loss(Pattern("FFFF"), [0])


def test_the_last_token_of_the_vocabulary_is_reported_as_0() -> None:
    class Clipping(Cardboard):
        def _reply(self, ids: list[int], shared: int) -> dict[str, Any]:
            reply = super()._reply(ids, shared)
            for entry in reply["meta_info"]["input_token_logprobs"]:
                entry[1] = 0 if entry[1] == 9 else entry[1]
            return reply

    found = ServedEvaluator(Clipping(), DATA).loss(Pattern("FFFF"), [1])
    assert found.mean == pytest.approx((0.8 + 0.9 + 0.2 + 0.1) / 4)


def test_a_static_engine() -> None:
    with pytest.raises(SearchError, match="--indexcache-mode live"):
        ServedEvaluator(Cardboard(mode="static"), DATA)


def test_the_time_for_a_call_grows_with_its_tokens() -> None:
    """32 batches of 8 x 200K tokens take 624 s at 82,000 a second: no fixed 600 s will do."""
    engine = Cardboard()
    long = Calibration(((1,) * 5000, (2,) * 3000), 2, "test")
    ServedEvaluator(engine, long).loss(Pattern("FFFF"), [0])
    ServedEvaluator(engine, long, timeout=7.0).loss(Pattern("FFFF"), [0])
    assert engine.timeouts == [608.0, 7.0]


def test_a_pool_shares_out_candidates() -> None:
    from concurrent.futures import ThreadPoolExecutor

    engines = [Cardboard(), Cardboard()]
    pool = ServerPool(engines, DATA)
    assert pool.in_flight == 2
    patterns = [Pattern("F" + "S" * n + "F" * (3 - n)) for n in range(4)] * 5
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda p: pool.loss(p, [0]).mean, patterns))
    assert found == pytest.approx([0.4 + len(p.shared_layers) for p in patterns])
    assert sum(len(engine.requests) for engine in engines) == 20
