"""A recent window on the CPU platform, against transformers with a mask of the oracle's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sglang_indexcache.ask.client import Client
from sglang_indexcache.ask.protocol import named
from sglang_indexcache.errors import ServerError
from sglang_indexcache.pattern import Pattern
from tests.e2e.conftest import (
    ROUNDING,
    Serve,
    decided_answer,
    decided_prompt,
    greedy,
    logprobs,
)
from tests.oracle import Oracle

PATTERNS = [Pattern(text) for text in ("FSSSFS", "FSSSFS+w8", "FFSSSS+w20", "FFFFFF+w8", "FFFFFF")]
CHUNK = "64"
"""Tokens: a window of a row at the start of a chunk lies in the chunk before."""


@pytest.fixture(scope="module")
def client(glm: Path, serve: Serve) -> Iterator[Client]:
    arguments = ["--dtype", "float32", "--indexcache-mode", "live", "--max-total-tokens", "16384"]
    with serve(glm, *arguments, "--chunked-prefill-size", CHUNK) as client:
        yield client


@pytest.fixture(scope="module")
def oracle(glm: Path) -> Oracle:
    return Oracle(glm, torch.float32)


def ask(client: Client, ids: list[int], count: int, pattern: Pattern) -> tuple[list[int], dict]:
    sampling = {"max_new_tokens": count, "temperature": 0.0, "ignore_eos": True}
    reply = client.generate(input_ids=ids, sampling_params=sampling | named(str(pattern)))
    return list(reply["output_ids"]), reply["meta_info"]


def test_chunked_prefill_is_the_oracles(client: Client, oracle: Oracle) -> None:
    for pattern in PATTERNS:
        client.switch_pattern(str(pattern))
        assert client.states()[0].pattern == str(pattern)
        for length in (63, 66, 200):
            ids = decided_prompt(oracle, length, pattern, seed=400)
            expected = oracle.answer(ids, pattern).logprobs
            torch.testing.assert_close(logprobs(client, ids), expected, rtol=0, atol=1e-3)


def test_requests_of_one_batch_have_windows_of_their_own(client: Client, oracle: Oracle) -> None:
    """Sent as one request: they are prefilled and decoded together."""
    client.flush_cache()
    before = client.states()[0].mixed_forwards
    asked = [(pattern, *decided_answer(oracle, 150, 24, pattern, 2000)) for pattern in PATTERNS]
    replies = client.generate(
        input_ids=[ids for _, ids, _ in asked],
        sampling_params=[
            {"max_new_tokens": 24, "temperature": 0.0, "ignore_eos": True} | named(str(pattern))
            for pattern, _, _ in asked
        ],
    )
    for reply, (pattern, _, expected) in zip(replies, asked, strict=True):
        assert reply["output_ids"] == expected, pattern
        assert reply["meta_info"]["indexcache_pattern"] == [str(pattern)]
    assert client.states()[0].mixed_forwards > before


def test_a_prefix_is_taken_from_the_cache_of_the_same_window_only(
    client: Client, oracle: Oracle
) -> None:
    client.flush_cache()
    bare, near, wider = Pattern("FSSSSS"), Pattern("FSSSSS+w4"), Pattern("FSSSSS+w5")
    ids = decided_prompt(oracle, 200, bare, near, wider, seed=400)
    for pattern in (bare, near, wider):
        expected, gap = oracle.greedy(ids, 8, pattern)
        first, told = ask(client, ids, 8, pattern)
        assert told["cached_tokens"] == 0, pattern
        again, told = ask(client, ids, 8, pattern)
        assert told["cached_tokens"] >= 128
        assert gap < ROUNDING or first == again == expected


def test_a_bad_window_is_refused(client: Client) -> None:
    with pytest.raises(ServerError, match="from 1 to 1024 tokens"):
        client.switch_pattern("uniform:1/2+w0")


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--tp", "2", "--dp", "2", "--enable-dp-attention"),
        ("--pp-size", "2", "--chunked-prefill-size", CHUNK),  # the second stage starts with an S
    ],
    ids=["one", "dp_attention", "stages"],
)
def test_static_mode(glm: Path, oracle: Oracle, serve: Serve, arguments: tuple[str, ...]) -> None:
    pattern = Pattern("FSSSFS+w8")
    ranks = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"} if arguments else {}
    ids = decided_prompt(oracle, 200, pattern, seed=400)
    text = ["--dtype", "float32", "--indexcache-pattern", str(pattern), *arguments]
    with serve(glm, *text, "--max-total-tokens", "8192", **ranks) as client:
        assert {state.pattern for state in client.states()} == {str(pattern)}
        expected = oracle.answer(ids, pattern).logprobs
        torch.testing.assert_close(logprobs(client, ids), expected, rtol=0, atol=1e-3)
        tokens, gap = oracle.greedy(ids, 16, pattern)
        assert gap < ROUNDING or greedy(client, ids, 16) == tokens
        reply = client.generate(input_ids=ids, sampling_params={"max_new_tokens": 1})
        assert reply["meta_info"]["indexcache_pattern"] == [str(pattern)]
