"""Live mode under load: the pattern is replaced a hundred times while requests run."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch

from sglang_indexcache.errors import ServerError
from sglang_indexcache.lab.client.http import Client
from sglang_indexcache.pattern import Pattern
from tests.e2e.conftest import check_metrics, decided_prompt, greedy, is_greedy, logprobs, prompt
from tests.oracle import Oracle

PATTERNS = [Pattern(text) for text in ("FFFFFF", "FSFSFS", "FSSSFS", "FFSSFS", "FSSSSS")]
SWITCHES = 100


@pytest.fixture
def client(live: Client) -> Client:
    return live


@pytest.fixture(scope="module")
def oracle(glm: Path) -> Oracle:
    return Oracle(glm, torch.float32)


def test_a_switch_takes_effect_at_once(client: Client, oracle: Oracle) -> None:
    ids = decided_prompt(oracle, 200, *PATTERNS, seed=400)
    for pattern in PATTERNS:
        client.switch_pattern(str(pattern))
        expected = oracle.answer(ids, pattern).logprobs
        torch.testing.assert_close(logprobs(client, ids), expected, rtol=0, atol=1e-3)


def test_cached_kv_of_another_pattern_is_never_reused(client: Client, oracle: Oracle) -> None:
    ids = decided_prompt(oracle, 300, *PATTERNS, seed=400)
    for pattern in (PATTERNS[0], PATTERNS[2]):
        client.switch_pattern(str(pattern))
        reply = client.generate(input_ids=ids, sampling_params={"max_new_tokens": 1})
        assert reply["meta_info"]["cached_tokens"] == 0
        is_greedy(oracle, ids, greedy(client, ids, 8), pattern)


def test_a_hundred_switches_under_load(client: Client, oracle: Oracle) -> None:
    """Every answer is that of exactly one pattern, whatever is switched meanwhile."""
    prompts = [decided_prompt(oracle, length, *PATTERNS, seed=400) for length in (150, 220, 300)]
    references = [[oracle.answer(ids, p).logprobs for p in PATTERNS] for ids in prompts]
    for answers in references:  # the patterns can be told apart
        for first, second in itertools.combinations(answers, 2):
            assert (first - second).abs().max() > 5e-3
    is_over = threading.Event()
    answers_by_pattern: Counter[int] = Counter()

    def prefill(worker: int) -> int:
        count = 0
        while not is_over.is_set():
            choice = (worker + count) % len(prompts)
            measured = logprobs(client, prompts[choice])
            errors = [float((measured - answer).abs().max()) for answer in references[choice]]
            assert min(errors) < 1e-3, f"no pattern gives this answer: {errors}"
            answers_by_pattern[errors.index(min(errors))] += 1
            count += 1
        return count

    def decode(worker: int) -> int:
        count = 0
        while not is_over.is_set():
            assert len(greedy(client, prompt(100 + 17 * worker + count % 50, worker), 24)) == 24
            count += 1
        return count

    def switch() -> None:
        try:
            for number in range(SWITCHES):
                pattern = PATTERNS[(number * 3 + 1) % len(PATTERNS)]
                [state] = client.switch_pattern(str(pattern))
                assert state.pattern == str(pattern)
        finally:
            is_over.set()

    before = client.states()[0].switches
    with ThreadPoolExecutor(8) as pool:
        workers = [pool.submit(prefill, i) for i in range(3)]
        workers += [pool.submit(decode, i) for i in range(3)]
        pool.submit(switch).result()
        counts = [worker.result() for worker in workers]
    assert min(counts) >= 1
    assert len(answers_by_pattern) == len(PATTERNS), (
        f"only these patterns answered: {answers_by_pattern}"
    )
    assert client.states()[0].switches - before == SWITCHES
    # A stale read would have raised StaleIndexError and ended the server.
    test_a_switch_takes_effect_at_once(client, oracle)


def test_the_same_pattern_again_is_no_switch(client: Client) -> None:
    client.switch_pattern("FFFFFF")
    before = client.states()[0]
    ids = prompt(100, 1)
    greedy(client, ids, 2)
    client.switch_pattern("full")
    after = client.states()[0]
    assert after.switches == before.switches
    assert client.generate(input_ids=ids, sampling_params={"max_new_tokens": 1})["meta_info"][
        "cached_tokens"
    ]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("FFFSS", "5 characters.*6"),
        ("SFFFFF", "starts with S"),
        ("FFFFSs", "Use capital letters"),
        ("nobody", "nobody"),
        ("1/4", "uniform:1/4"),
    ],
)
def test_a_bad_pattern_is_refused_and_nothing_changes(
    client: Client, value: str, reason: str
) -> None:
    client.switch_pattern("FSFSFS")
    with pytest.raises(ServerError, match=reason):
        client.switch_pattern(value)
    assert client.states()[0].pattern == "FSFSFS"


def test_metrics_are_what_was_counted(client: Client) -> None:
    """This test is the module's last: it comes after all its traffic, switches and refusals."""
    with pytest.raises(ServerError):
        client.switch_pattern("FFF")
    greedy(client, prompt(50, 1), 2)
    check_metrics(client)


def test_profiles_and_releases_leave_the_server_as_it_was(client: Client, tmp_path: Path) -> None:
    """Each of these ended it, where the platform had no answer for SGLang."""

    def post(path: str, **body: object) -> None:
        answer = httpx.post(f"{client.url}{path}", json=body, timeout=120)
        assert answer.status_code == 200, answer.text

    ids = prompt(100, 7)
    before = greedy(client, ids, 4)
    post("/start_profile", output_dir=str(tmp_path), activities=["CPU"])
    during = greedy(client, ids, 4)
    post("/stop_profile")
    assert any(tmp_path.iterdir())
    post("/release_memory_occupation")
    post("/resume_memory_occupation")
    assert before == during == greedy(client, ids, 4)
