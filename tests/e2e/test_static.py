"""Static mode: what is not built cannot run, and scheduling changes nothing.

One server with a small KV pool, small prefill chunks, mixed batches and pages of 64 tokens, so
that chunking, radix hits and retraction all happen with prompts of a few hundred tokens.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from sglang_indexcache.lab.client.http import Client
from sglang_indexcache.pattern import Pattern
from tests.e2e.conftest import (
    Serve,
    batch_logprobs,
    decided_prompt,
    greedy,
    is_greedy,
    logprobs,
    prompt,
)
from tests.oracle import Oracle

PATTERN = Pattern("FSSFSS")
POOL = 2048


@pytest.fixture(scope="module")
def client(glm: Path, serve: Serve) -> Iterator[Client]:
    arguments = [
        *("--dtype", "float32", "--indexcache-pattern", str(PATTERN)),
        *("--chunked-prefill-size", "128", "--enable-mixed-chunk", "--page-size", "64"),
        *("--max-total-tokens", str(POOL), "--schedule-conservativeness", "0.1"),
    ]
    # The scheduler reserves room for what a request may still generate; told to expect less than
    # is asked for, it overfills the pool and has to retract.
    with serve(glm, *arguments, SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION="16") as client:
        yield client


@pytest.fixture(scope="module")
def oracle(glm: Path) -> Oracle:
    return Oracle(glm, torch.float32)


def fresh(client: Client) -> None:
    client.flush_cache()


def test_reports_what_it_does(client: Client) -> None:
    [state] = client.states()
    assert state.pattern == str(PATTERN)
    assert state.mode == "static"
    assert (state.full_layers, state.shared_layers) == (2, 4)
    assert client.server_info()["disable_overlap_schedule"] is False
    assert state.source == "--indexcache-pattern FSSFSS (given literally)"


def test_shared_layers_do_no_indexer_work(client: Client) -> None:
    fresh(client)
    before = client.states()[0]
    greedy(client, prompt(300, 1), 8)
    after = client.states()[0]
    forwards = after.forwards - before.forwards
    assert forwards >= 10  # three chunks and the generated tokens
    for layer in range(6):
        selections = after.indexer_selections[layer] - before.indexer_selections[layer]
        reuses = after.index_reuses[layer] - before.index_reuses[layer]
        assert (selections, reuses) == ((forwards, 0) if PATTERN.is_full(layer) else (0, forwards))
    assert after.index_key_writes == [0] * 6


def test_shared_layers_have_no_index_key_memory(client: Client) -> None:
    # float32 keys of 128 entries in two of six layers
    assert client.states()[0].index_k_bytes_per_token == 2 * 128 * 4


@pytest.mark.parametrize("length", [127, 128, 129, 400])
def test_chunked_prefill_changes_nothing(client: Client, oracle: Oracle, length: int) -> None:
    fresh(client)
    ids = decided_prompt(oracle, length, PATTERN)
    expected = oracle.answer(ids, PATTERN).logprobs
    torch.testing.assert_close(logprobs(client, ids), expected, rtol=0, atol=1e-3)


def test_radix_hit_changes_nothing(client: Client, oracle: Oracle) -> None:
    fresh(client)
    ids = decided_prompt(oracle, 300, PATTERN)
    first = greedy(client, ids, 16)
    reply = client.generate(
        input_ids=ids,
        sampling_params={"max_new_tokens": 16, "temperature": 0.0, "ignore_eos": True},
    )
    assert reply["meta_info"]["cached_tokens"] >= 256
    assert reply["output_ids"] == first
    assert is_greedy(oracle, ids, first, PATTERN)


def test_shared_prefix_of_different_prompts(client: Client, oracle: Oracle) -> None:
    fresh(client)
    for seed in range(60):
        prefix = prompt(192, 3)
        prompts = [prefix + prompt(50 + 30 * i, seed + i) for i in range(3)]
        answers = [oracle.answer(ids, PATTERN) for ids in prompts]
        if min(answer.margin for answer in answers) > 1e-6:
            break
    logprobs(client, prompts[0])
    replies = batch_logprobs(client, prompts[1:], start=200)
    for measured, answer in zip(replies, answers[1:], strict=True):
        torch.testing.assert_close(measured, answer.logprobs[-len(measured) :], rtol=0, atol=1e-3)


def test_retraction_recovers(client: Client, oracle: Oracle) -> None:
    """More tokens than the pool holds: running requests are retracted and come back unharmed."""
    fresh(client)
    prompts, count = [prompt(130, 100 + i) for i in range(10)], 130  # of five pages each, of 32
    with ThreadPoolExecutor(len(prompts)) as pool:
        replies = list(pool.map(lambda ids: _generate(client, ids, count), prompts))
    assert all(len(reply["output_ids"]) == count for reply in replies)
    retracted = [i for i, r in enumerate(replies) if r["meta_info"]["num_retractions"] > 0]
    assert retracted
    pairs = zip(prompts, replies, strict=True)
    assert sum(is_greedy(oracle, ids, reply["output_ids"], PATTERN) for ids, reply in pairs) > 5


def _generate(client: Client, ids: list[int], count: int) -> Any:
    return client.generate(
        input_ids=ids,
        sampling_params={"max_new_tokens": count, "temperature": 0.0, "ignore_eos": True},
    )


def test_mixed_batches_of_prefill_and_decode(client: Client, oracle: Oracle) -> None:
    fresh(client)
    prompts = [prompt(length, 200 + length) for length in (90, 300, 10, 170)]

    def later(item: tuple[int, list[int]]) -> list[int]:
        time.sleep(0.15 * item[0])
        return list(_generate(client, item[1], 24)["output_ids"])

    with ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(later, enumerate(prompts)))
    for ids, tokens in zip(prompts, replies, strict=True):
        is_greedy(oracle, ids, tokens, PATTERN)


def test_abort_leaves_a_working_server(client: Client, oracle: Oracle) -> None:
    fresh(client)
    body = {
        "input_ids": prompt(300, 9),
        "sampling_params": {"max_new_tokens": 1000, "ignore_eos": True},
        "stream": True,
    }
    with (
        httpx.Client(timeout=60, trust_env=False) as http,
        http.stream("POST", f"{client.url}/generate", json=body) as stream,
    ):
        next(stream.iter_lines())
    ids = decided_prompt(oracle, 150, PATTERN)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:  # the disconnect reaches the scheduler in its own time
        tokens = greedy(client, ids, 4)
        if tokens == oracle.greedy_behind(ids, tokens, PATTERN)[0]:
            return
    raise AssertionError("the answers after an abort are wrong")


def test_static_and_live_agree_exactly(client: Client, live: Client) -> None:
    """The same kernels on the same inputs: not one bit may differ."""
    prompts = [prompt(length, 50) for length in (70, 130, 350)]

    def answers(server: Client) -> list[torch.Tensor]:
        fresh(server)
        return [logprobs(server, ids) for ids in prompts]

    static = answers(client)
    [before] = live.switch_pattern(str(PATTERN))  # its warm-up ran every indexer
    for mine, theirs in zip(static, answers(live), strict=True):
        assert torch.equal(mine, theirs)
    [state] = live.states()
    assert state.indexer_selections[1] == before.indexer_selections[1]
    # Live mode keeps the keys for other patterns.
    assert state.index_key_writes[1] > before.index_key_writes[1]
    assert state.index_k_bytes_per_token == 6 * 128 * 4


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
