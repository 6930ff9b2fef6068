"""Each request under its own pattern: many at once, none mixed, none in another's way.

Asked of a model with index keys of 192 entries, so that these pass through everything here.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from openai import BadRequestError, OpenAI

from sglang_indexcache.errors import ServerError
from sglang_indexcache.lab.client.http import Client
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.operating.show import judge
from tests.e2e.conftest import ROUNDING, Serve, decided_prompt, greedy, is_greedy, prompt
from tests.oracle import Oracle

REQUESTS = 48
SEED = 20261122
LOGIT_TIE = 1e-4
"""Two tokens nearer to each other than this in log-probability are a coin toss in float32."""


@pytest.fixture(scope="module")
def oracle(wide: Path) -> Oracle:
    return Oracle(wide, torch.float32)


def under(pattern: object, **sampling: Any) -> dict[str, Any]:
    """Sampling parameters of a greedy request that names ``pattern``; None names nothing."""
    custom = {} if pattern is None else {"custom_params": {"indexcache_pattern": pattern}}
    return {"temperature": 0.0, "ignore_eos": True, **sampling, **custom}


def served_under(reply: Any) -> str:
    """Return the pattern that an answer tells."""
    [text] = reply["meta_info"]["indexcache_pattern"]
    return str(text)


# -- many at once ------------------------------------------------------------------------------


@dataclass
class Ask:
    """A request: what it names (None: the default), and whether its client goes away."""

    ids: list[int]
    name: str | None
    count: int
    is_aborted: bool


def asks(generator: random.Random, patterns: list[str]) -> list[Ask]:
    return [
        Ask(
            ids=prompt(generator.randrange(1, 420), number),
            name=generator.choice([*patterns, None, None, None, None]),
            count=generator.randrange(4, 24),
            is_aborted=number % 3 == 2,
        )
        for number in range(REQUESTS)
    ]


def send(client: Client, ask: Ask) -> Any:
    body = {
        "input_ids": ask.ids,
        "sampling_params": under(ask.name, max_new_tokens=ask.count),
        "return_logprob": True,
    }
    if not ask.is_aborted:
        return client.generate(**body)
    for number, _ in enumerate(client.stream(**body)):
        if number == ask.count // 3:
            return None  # closes the connection, which aborts the request
    return None


def check_greedy(oracle: Oracle, ask: Ask, reply: Any, tally: Counter[str]) -> None:
    """Its tokens are those of transformers under its own pattern, one after the other."""
    text = served_under(reply)
    assert ask.name in (None, text)
    tokens, count = reply["output_ids"], ask.count
    assert len(tokens) == count
    answer = oracle.answer(ask.ids + tokens, Pattern(text))
    measured = torch.tensor([entry[0] for entry in reply["meta_info"]["output_token_logprobs"]])
    apart = float((measured - answer.logprobs[-count:]).abs().max())
    behind = float(answer.behind[-count:].max())
    if apart > 1e-3 or behind > LOGIT_TIE:
        how = "named" if ask.name else "was given"
        assert answer.margin < ROUNDING, (
            f"{len(ask.ids)} tokens under {text}, which it {how}: log-probabilities are {apart} "
            f"apart, another token is likelier by {behind}, and no selection was a near-tie"
        )
        tally["near-tie of a selection"] += 1
        return
    tally["near-tie of two tokens" if behind else "equal token for token"] += 1
    # Asking transformers takes most of the test's time, so of other patterns one is enough.
    other = oracle.answer(ask.ids + tokens, Pattern("FFFFFF" if text == "FSSSSS" else "FSSSSS"))
    far = float((other.logprobs[-count:] - measured).abs().max())
    tally["told apart from another pattern"] += far > 5e-3


def stress(client: Client, oracle: Oracle, patterns: list[str], defaults: list[str]) -> None:
    """Every finished answer is that of its own pattern while the default is switched."""
    generator = random.Random(SEED)
    todo, is_over = asks(generator, patterns), threading.Event()
    switched: list[str] = []

    def switch() -> None:
        while not is_over.wait(0.1) or len(switched) < len(defaults):
            value = defaults[len(switched) % len(defaults)]
            assert {state.pattern for state in client.switch_pattern(value)} == {value}
            switched.append(value)

    with ThreadPoolExecutor(17) as pool:
        switching = pool.submit(switch)
        try:
            replies = list(pool.map(lambda ask: send(client, ask), todo))
        finally:
            is_over.set()
        switching.result()
    tally: Counter[str] = Counter()
    for ask, reply in zip(todo, replies, strict=True):
        if reply is not None:
            check_greedy(oracle, ask, reply, tally)
            tally[f"under {served_under(reply)}"] += 1
            tally["retracted"] += reply["meta_info"]["num_retractions"] > 0
    print(f"seed {SEED}, {len(switched)} switches: {dict(tally)}")
    finished = sum(not ask.is_aborted for ask in todo)
    assert tally["equal token for token"] > 0.8 * finished
    assert tally["told apart from another pattern"] > 0.5 * finished
    assert tally["retracted"] > 0
    assert len([key for key in tally if key.startswith("under")]) >= 8
    wait_until_idle(client)
    # A storm may keep both ranks at work; and an idle rank is padded only while the other decodes.
    greedy(client, prompt(1, 701), 16)
    states = client.states()
    assert all(state.mixed_forwards for state in states)
    assert sum(state.idle_forwards for state in states) > 0
    assert {judge(state).uncounted for state in states} == {""}  # no forward without layers


def wait_until_idle(client: Client) -> None:
    """Aborted requests leave a moment after their clients; then no pattern has any."""
    for _ in range(6000):
        if not any(state.requests for state in client.states()):
            return
        threading.Event().wait(0.1)
    raise AssertionError(f"requests are left: {client.states()}")


def test_many_patterns_at_once_under_dp_attention(wide: Path, serve: Serve, oracle: Oracle) -> None:
    """Chunks, retractions, aborts, idle ranks; every rank decides alike."""
    generator = random.Random(SEED)
    legal = [f"F{number:05b}".replace("0", "S").replace("1", "F") for number in range(32)]
    patterns, defaults = legal[:], ["FSFSFS", "FFFFFF", "FSSSSS"]
    generator.shuffle(patterns)
    arguments = ["--tp", "2", "--dp", "2", "--enable-dp-attention", "--dtype", "float32"]
    arguments += ["--indexcache-mode", "live", "--indexcache-pattern", "FSFSFS"]
    arguments += ["--max-total-tokens", "8192", "--chunked-prefill-size", "128"]
    environment = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "SGLANG_TEST_RETRACT": "1",
                   "SGLANG_TEST_RETRACT_INTERVAL": "3"}  # fmt: skip
    with serve(wide, *arguments, **environment) as client:
        stress(client, oracle, patterns[:10], defaults)


# -- sessions whose turns are given up ---------------------------------------------------------


@dataclass
class Conversation:
    """A session of two turns that name different patterns; some give up the first.

    Only few can be streaming: such a session keeps its place among the running requests.
    """

    client: Client
    number: int
    patterns: tuple[str, str]
    gives_up: bool
    is_streaming: bool

    def hold(self) -> str:
        """Return how the first turn ended, when the second was answered under the right pattern."""
        opened = {"capacity_of_str_len": 1000, "streaming": self.is_streaming}
        session = self.client._request("POST", "/open_session", opened)
        first, second = self.patterns
        if self.gives_up:
            # A busy machine takes a turn into the queue late, a quiet one soon out of it.
            threading.Timer(0.2 * (1 + self.number % 5), self._abort).start()
        outcome = self._turn(session, first, rid=f"turn-{self.number}-")
        for _ in range(300):
            if (answer := self._turn(session, second)) != "full":
                break
            threading.Event().wait(0.2)
        assert answer == ("refused" if outcome == "served" else "served"), (outcome, self)
        return outcome

    def _abort(self) -> None:
        httpx.post(f"{self.client.url}/abort_request", json={"rid": f"turn-{self.number}-"})

    def _turn(self, session: str, name: str, **more: Any) -> str:
        """Whether a turn was ``served``, ``aborted``, ``refused`` or found the queue ``full``."""
        reply = httpx.post(
            f"{self.client.url}/generate",
            json={
                "input_ids": prompt(60, self.number),
                "session_params": {"id": session},
                "sampling_params": under(name, max_new_tokens=12),
                **more,
            },
            timeout=300,
        )
        if reply.status_code == 503:
            return "full"
        if reply.status_code == 400:
            assert "begun under pattern" in reply.text
            return "refused"
        if reply.json()["meta_info"]["finish_reason"]["type"] == "abort":
            return "aborted"
        assert served_under(reply.json()) == name
        return "served"


def test_a_turn_that_is_given_up_in_the_queue_decides_nothing(glm: Path, serve: Serve) -> None:
    """It was aborted there, or the queue was full; and nobody waits for it for ever."""
    generator = random.Random(SEED)
    patterns = ["FFFFFF", "FSFSFS", "FSSSSS", "FFSSFS"]
    arguments = ["--dtype", "float32", "--indexcache-mode", "live", "--max-total-tokens", "16384"]
    arguments += ["--max-running-requests", "6", "--max-queued-requests", "8"]
    with (
        serve(glm, *arguments, "--enable-streaming-session") as client,
        ThreadPoolExecutor(24) as p,
    ):
        tally: Counter[str] = Counter()
        for start in range(0, 240, 48):  # until a turn was given up at the right moment
            conversations = [
                Conversation(client, n, (*generator.sample(patterns, 2),), n % 3 == 0, n % 16 == 0)
                for n in range(start, start + 48)
            ]
            tally += Counter(p.map(Conversation.hold, conversations))
            if min(tally[outcome] for outcome in ("served", "aborted", "full")):
                break
        assert min(tally["served"], tally["aborted"], tally["full"]) > 0, tally
        wait_until_idle(client)  # while the sessions are open
    print(dict(tally))


# -- one server of one rank --------------------------------------------------------------------

POLICY = "full < 100 <= FSFSFS < 200 <= FSSSSS"
BY_LENGTH = {60: "FFFFFF", 99: "FFFFFF", 100: "FSFSFS", 199: "FSFSFS", 200: "FSSSSS"}


@pytest.fixture(scope="module")
def client(wide: Path, serve: Serve) -> Iterator[Client]:
    arguments = ["--dtype", "float32", "--indexcache-mode", "live", "--max-total-tokens", "16384"]
    arguments += ["--indexcache-pattern", POLICY, "--enable-mixed-chunk"]
    arguments += ["--chunked-prefill-size", "128", "--enable-streaming-session"]
    with serve(wide, *arguments) as client:
        yield client


def test_prompt_length_decides_where_nothing_is_named(client: Client) -> None:
    assert client.states()[0].policy == "FFFFFF < 100 <= FSFSFS < 200 <= FSSSSS"
    for length, pattern in BY_LENGTH.items():
        sampling = under(None, max_new_tokens=1)
        reply = client.generate(input_ids=prompt(length, 3), sampling_params=sampling)
        assert served_under(reply) == pattern
    with_name = client.generate(
        input_ids=prompt(300, 3), sampling_params=under("uniform:1/3", max_new_tokens=1)
    )
    assert served_under(with_name) == "FSSFSS"


def test_prefixes_are_shared_within_a_pattern_only(client: Client, oracle: Oracle) -> None:
    patterns = [Pattern(text) for text in ("FFSSFS", "FSSFSS")]
    ids = decided_prompt(oracle, 260, *patterns, seed=30)
    cached = []
    for pattern in (*patterns, *patterns):
        reply = client.generate(
            input_ids=ids, sampling_params=under(str(pattern), max_new_tokens=8)
        )
        cached.append(reply["meta_info"]["cached_tokens"])
        is_greedy(oracle, ids, reply["output_ids"], pattern)
    assert cached == [0, 0, 256, 256]  # pages of 64


def test_no_key_of_a_users_reaches_another_patterns_cache(client: Client) -> None:
    ids, key = prompt(150, 31), f"indexcache-live-{Pattern('FSFSFF').digest}"
    for pattern, extra_key in (("FSFSFF", None), ("FFFFFF", key), ("FSFSFF", key)):
        reply = client.generate(
            input_ids=ids, extra_key=extra_key, sampling_params=under(pattern, max_new_tokens=1)
        )
        expected = 128 if (pattern, extra_key) == ("FSFSFF", key) else 0
        assert reply["meta_info"]["cached_tokens"] == expected, (pattern, extra_key)


def work(client: Client, patterns: list[str]) -> set[int]:
    """The layers whose indexers ran while requests under ``patterns`` were served together."""
    before = client.states()[0]
    with ThreadPoolExecutor(len(patterns)) as pool:
        list(pool.map(lambda text: client.generate(
            input_ids=prompt(150, 40), sampling_params=under(text, max_new_tokens=6)
        ), patterns))  # fmt: skip
    after = client.states()[0]
    counts = [
        new - old for old, new in zip(
            before.indexer_selections, after.indexer_selections, strict=True
        )
    ]  # fmt: skip
    assert counts[0] == after.forwards - before.forwards
    return {layer for layer, count in enumerate(counts) if count}


def test_indexers_run_on_the_f_layers_of_the_patterns_in_the_batch(client: Client) -> None:
    assert work(client, ["FSSFSS"]) == {0, 3}
    assert work(client, ["FSSFSS"] * 3) == {0, 3}
    assert work(client, ["FSSFSS", "FSSSSF"]) == {0, 3, 5}


def test_the_mixed_batch_of_one_request_list(client: Client, oracle: Oracle) -> None:
    """Prompts of one call are admitted together, so they share their forwards."""
    texts = ["FFFFFF", "FSSSSS", "FSFSFS", "FFSSFS", "FSSSFF"]
    lengths = [240, 130, 1, 77, 190]
    patterns = [Pattern(text) for text in texts]
    prompts = [
        decided_prompt(oracle, length, pattern, seed=50)
        for length, pattern in zip(lengths, patterns, strict=True)
    ]
    replies = client.generate(
        input_ids=prompts,
        sampling_params=[under(text, max_new_tokens=1) for text in texts],
        return_logprob=True,
        logprob_start_len=0,
    )
    for reply, ids, pattern in zip(replies, prompts, patterns, strict=True):
        assert served_under(reply) == str(pattern)
        measured = torch.tensor(
            [entry[0] for entry in reply["meta_info"]["input_token_logprobs"][1:]]
        )
        expected = oracle.answer(ids, pattern).logprobs
        torch.testing.assert_close(measured, expected, rtol=0, atol=1e-3)


def test_a_switch_leaves_running_requests_alone(client: Client, oracle: Oracle) -> None:
    first, second = Pattern("FFSFSS"), Pattern("FSSSSF")
    ids = decided_prompt(oracle, 220, first, second, seed=60)
    client.switch_pattern(str(first))
    chunks = client.stream(input_ids=ids, sampling_params=under(None, max_new_tokens=4000))
    next(chunks)
    assert client.states()[0].requests == {str(first): 1}
    client.switch_pattern(str(second))
    first_chunk = next(chunk for chunk in chunks if len(chunk["output_ids"]) >= 40)
    chunks.close()
    wait_until_idle(client)
    assert served_under(first_chunk) == str(first)
    assert first_chunk["meta_info"]["num_retractions"] == 0
    is_greedy(oracle, ids, first_chunk["output_ids"][:40], first)
    after = client.generate(input_ids=ids, sampling_params=under(None, max_new_tokens=1))
    assert served_under(after) == str(second)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_session_keeps_its_pattern(client: Client, oracle: Oracle, streaming: bool) -> None:
    """Its answers are those of its pattern on the whole text, also after a turn that is refused."""
    client.switch_pattern("FSSSSS")
    opened = {"capacity_of_str_len": 1000, "streaming": streaming}
    session = client._request("POST", "/open_session", opened)
    history: list[int] = []
    rid = None

    def turn(name: str | None) -> None:
        nonlocal rid
        ids = prompt(90, 70 + len(history))
        reply = client.generate(
            input_ids=ids,
            session_params={"id": session, "rid": None if streaming else rid},
            sampling_params=under(name, max_new_tokens=6),
        )
        history.extend(ids)
        assert served_under(reply) == "FSSSSS"
        is_greedy(oracle, history, reply["output_ids"], Pattern("FSSSSS"), LOGIT_TIE)
        history.extend(reply["output_ids"])
        rid = reply["meta_info"]["id"]

    turn(None)
    client.switch_pattern("FFFFFF")
    turn(None)
    for name in ("FFFFFF", "FFSSFS"):
        with pytest.raises(ServerError, match=r"400.*begun under pattern FSSSSS and cannot go on"):
            turn(name)
        turn(None)
    turn("FSSSSS")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 2}}),
        ("/v1/completions", {"model": "m", "prompt": "x", "max_tokens": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/messages", {"max_tokens": 2, "messages": [{"role": "user", "content": "x"}]}),
        ("/api/generate", {"prompt": "x", "options": {"num_predict": 2}}),
        ("/v1/responses", {"model": "MODEL", "input": "x", "max_output_tokens": 2}),
    ],
)
def test_no_route_answers_a_name_that_it_does_not_read(
    client: Client, wide: Path, route: str, body: dict[str, Any], stream: bool
) -> None:
    fields = {"model": "m", "max_tokens": 2, "stream": stream} | body
    if fields["model"] == "MODEL":
        fields["model"] = str(wide)

    def ask(**more: Any) -> int:
        return httpx.post(f"{client.url}{route}", json=fields | more, timeout=60).status_code

    assert ask() == 200
    assert ask(indexcache_pattern="full") == 400


def test_an_unknown_session_is_one_clear_answer(client: Client) -> None:
    body = {"input_ids": [20, 21], "session_params": {"id": "nobody"}}
    with pytest.raises(ServerError, match="session id nobody does not exist"):
        client.generate(**body, sampling_params=under("FSSFSS"))
    wait_until_idle(client)
    reply = client.generate(input_ids=[20, 21], sampling_params=under("FSSFSS", max_new_tokens=1))
    assert served_under(reply) == "FSSFSS"


def test_openai_clients_name_a_pattern_too(client: Client) -> None:
    openai = OpenAI(base_url=f"{client.url}/v1", api_key="none", max_retries=0)
    chat: dict[str, Any] = {
        "model": "default", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2
    }  # fmt: skip
    extra = {"custom_params": {"indexcache_pattern": "FSFFFF"}, "return_meta_info": True}
    reply = openai.chat.completions.create(**chat, extra_body=extra)
    assert reply.choices[0].meta_info["indexcache_pattern"] == ["FSFFFF"]  # type: ignore[attr-defined]
    nobody = {"custom_params": {"indexcache_pattern": "nobody"}}
    for stream in (False, True):
        with pytest.raises(BadRequestError, match="no pattern is called 'nobody'"):
            openai.chat.completions.create(**chat, stream=stream, extra_body=nobody)
    openai.completions.create(model="default", prompt="x", max_tokens=2, extra_body=extra)


def test_as_many_patterns_as_there_are_run_at_once_whatever_they_are_called(
    client: Client,
) -> None:
    """Six layers have 32 patterns; another name of one is no other."""
    legal = [f"F{number:05b}".replace("0", "S").replace("1", "F") for number in range(32)]
    replies = client.generate(
        input_ids=[prompt(70, 80)] * 33,
        sampling_params=[under(t, max_new_tokens=1) for t in [*legal, "full"]],
    )
    assert [served_under(reply) for reply in replies] == [*legal, "FFFFFF"]


def test_names_are_checked_in_every_tokenizer_process(wide: Path, serve: Serve) -> None:
    """They load no plugins; a stream used to get HTTP 200 and the error as its first event."""
    arguments = ["--tokenizer-worker-num", "2", "--indexcache-mode", "live"]
    with serve(wide, "--max-total-tokens", "8192", *arguments) as client:
        for _ in range(8):  # connections go to either process
            for stream in (False, True):
                body = {"input_ids": [20], "stream": stream, "sampling_params": under("nobody")}
                assert httpx.post(f"{client.url}/generate", json=body).status_code == 400
            good = {"input_ids": [20], "sampling_params": under("uniform:1/3", max_new_tokens=1)}
            reply = httpx.post(f"{client.url}/generate", json=good)
            assert served_under(reply.json()) == "FSSFSS"
