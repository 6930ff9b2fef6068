"""Checks of an engine's log-probabilities, with an engine of cardboard."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_indexcache.errors import ServerError, ServerUnavailableError
from sglang_indexcache.lab.client.score import Prompt, TokenScores, ask, score, time_allowed
from sglang_indexcache.serving.protocol import PATTERN_OF_REQUEST, RankState
from tests.fakes import state


class Cardboard:
    """Token t costs t/10 nats wherever it stands; ``change`` makes something wrong of a reply."""

    name = "cardboard"

    def __init__(self, change: Any = lambda info: None) -> None:
        self.change = change
        self.bodies: list[dict[str, Any]] = []

    def states(self) -> list[RankState]:
        return [state("FFFF", "live")]

    def generate(self, *, timeout: float | None = None, **body: Any) -> Any:
        self.bodies.append(body | {"timeout": timeout})
        return [self._reply(body, place) for place in range(len(body["input_ids"]))]

    def _reply(self, body: dict[str, Any], place: int) -> dict[str, Any]:
        ids, sampling = body["input_ids"][place], body["sampling_params"][place]
        info: dict[str, Any] = {"prompt_tokens": len(ids), "cached_tokens": 0}
        if "custom_params" in sampling:
            info[PATTERN_OF_REQUEST] = [sampling["custom_params"][PATTERN_OF_REQUEST]]
        if "logprob_start_len" in body:
            scored = ids[body["logprob_start_len"][place] :]
            info["input_token_logprobs"] = [[None, scored[0], None]]
            info["input_token_logprobs"] += [[-t / 10, t, None] for t in scored[1:]]
            info["input_top_logprobs"] = [None]
            info["input_top_logprobs"] += [
                [[-9.0, 1, None], [-t / 10, t, None]] for t in scored[1:]
            ]
        self.change(info)
        return {"meta_info": info}


PROMPT = Prompt((1, 2, 3, 4), "FSFS", "mine", scored=2)


def test_the_last_tokens_are_scored_under_the_prompts_own_pattern_and_key() -> None:
    engine = Cardboard()
    full_scored = Prompt((7, 8, 9), "FFFF", "other", scored=2)
    assert score(engine, [PROMPT, full_scored], top=2) == [
        TokenScores([-0.3, -0.4], [[(3, -0.3), (1, -9.0)], [(4, -0.4), (1, -9.0)]], 4),
        TokenScores([-0.8, -0.9], [[(8, -0.8), (1, -9.0)], [(9, -0.9), (1, -9.0)]], 3),
    ]
    [body] = engine.bodies
    assert body["logprob_start_len"] == [1, 0]
    assert body["extra_key"] == ["mine", "other"]
    assert body["timeout"] == time_allowed(7) == 600.007
    assert [params["max_new_tokens"] for params in body["sampling_params"]] == [0, 0]


def test_what_is_not_asked_for_is_not_named() -> None:
    engine = Cardboard()
    ask(engine, [Prompt((1, 2))], 5)
    [body] = engine.bodies
    assert set(body) == {"input_ids", "sampling_params", "timeout"}
    assert body["sampling_params"] == [{"max_new_tokens": 5, "temperature": 0.0}]


def test_the_last_token_of_the_vocabulary_is_reported_as_0() -> None:
    def clip(info: dict[str, Any]) -> None:
        info["input_token_logprobs"][-1][1] = 0

    [scores] = score(Cardboard(clip), [PROMPT])
    assert scores.logprobs == [-0.3, -0.4]


def entry(place: int, value: Any) -> Any:
    return lambda info: info["input_token_logprobs"][-1].__setitem__(place, value)


WRONG: dict[str, tuple[Any, str]] = {
    "another pattern": (
        lambda info: info.update({PATTERN_OF_REQUEST: ["FFFF"]}),
        "cardboard was asked for pattern FSFS and answered under FFFF",
    ),
    "no pattern": (
        lambda info: info.pop(PATTERN_OF_REQUEST),
        "asked for pattern FSFS and answered without saying under which pattern",
    ),
    "cached beyond the start": (
        lambda info: info.update(cached_tokens=2),
        r"from its cache \(2 tokens, and the scored ones begin at 1\).*--disable-radix-cache",
    ),
    "cut": (
        lambda info: info.update(prompt_tokens=3),
        "read 3 of a prompt's 4 tokens: it cuts long prompts.*--allow-auto-truncate",
    ),
    "one token lost": (
        lambda info: info["input_token_logprobs"].pop(),
        "scored 1 tokens where 2 were asked for",
    ),
    "one row lost": (lambda info: info["input_top_logprobs"].pop(), "where 2 were asked for"),
    "nothing": (lambda info: info.pop("input_token_logprobs"), "scored 0 tokens where 2"),
    "other tokens": (entry(1, 9), "scored other tokens than those"),
    "NaN": (entry(0, float("nan")), "a log-probability that is none.*NaN"),
    "infinite": (entry(0, float("-inf")), "a log-probability that is none"),
    "above zero": (entry(0, 0.01), "a log-probability that is none"),
    "none": (entry(0, None), "a log-probability that is none"),
    "no reply": (lambda info: info.pop("cached_tokens"), "no reply of SGLang's /generate"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_answer_is_refused_by_name(fault: str) -> None:
    change, message = WRONG[fault]
    with pytest.raises(ServerError, match=message) as error:
        score(Cardboard(change), [PROMPT], top=2)
    assert not isinstance(error.value, ServerUnavailableError)


def test_a_request_that_was_given_up_may_be_asked_again() -> None:
    reason = {"type": "abort", "message": "shut down"}
    with pytest.raises(ServerUnavailableError, match="cardboard gave a request up: shut down"):
        score(Cardboard(lambda info: info.update(finish_reason=reason)), [PROMPT])


@pytest.mark.parametrize("answer", [{"hello": "world"}, [], [{"hello": "world"}]])
def test_something_that_is_no_answer(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    monkeypatch.setattr(Cardboard, "generate", lambda self, **_: answer)
    with pytest.raises(ServerError, match=r"with something else|no reply of SGLang's /generate"):
        score(Cardboard(), [PROMPT])
