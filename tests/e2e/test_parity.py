"""Parity with transformers: the same checkpoint, the same ``indexer_types``.

Prompts reach several times index_topk (64), so that selection matters in most rows. A top-k whose
boundary scores differ by less than float rounding is a coin toss in any implementation, so the
float32 prompts are ones for which the oracle itself sees no such tie.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sglang_indexcache.lab.client.http import Client
from sglang_indexcache.pattern import Pattern
from tests.e2e.conftest import (
    VOCAB,
    Serve,
    batch_logprobs,
    decided_prompt,
    greedy,
    is_greedy,
    logprobs,
    prompt,
    steady_prompt,
)
from tests.fixtures.models import make_model
from tests.oracle import Oracle

PATTERNS = ["FFFFFF", "FSFSFS", "FSSSFS", "FFSSFS"]  # full, 1/2, 1/4, and one that is none of them
LENGTHS = [1, 2, 63, 64, 65, 130, 333]


@pytest.fixture(scope="module", params=["glm-5", "deepseek-v3.2"])
def client_and_oracle(
    request: pytest.FixtureRequest, checkpoints: dict[str, Path], serve: Serve
) -> Iterator[tuple[Client, Oracle]]:
    folder = checkpoints[request.param]
    oracle = Oracle(folder, torch.float32)
    if request.param == "glm-5":
        yield request.getfixturevalue("live"), oracle
        return
    with serve(folder, "--dtype", "float32", "--indexcache-mode", "live") as client:
        yield client, oracle


@pytest.mark.parametrize("text", PATTERNS)
def test_float32_logprobs(client_and_oracle: tuple[Client, Oracle], text: str) -> None:
    client, oracle = client_and_oracle
    pattern = Pattern(text)
    client.switch_pattern(text)
    for length in LENGTHS:
        ids = decided_prompt(oracle, length, pattern)
        expected = oracle.answer(ids, pattern).logprobs
        torch.testing.assert_close(logprobs(client, ids), expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("text", PATTERNS)
def test_float32_batch_of_unequal_lengths(
    client_and_oracle: tuple[Client, Oracle], text: str
) -> None:
    client, oracle = client_and_oracle
    pattern = Pattern(text)
    client.switch_pattern(text)
    client.flush_cache()
    prompts = [decided_prompt(oracle, length, pattern) for length in (200, 3, 70, 1, 129)]
    for ids, measured in zip(prompts, batch_logprobs(client, prompts), strict=True):
        expected = oracle.answer(ids, pattern).logprobs
        torch.testing.assert_close(measured, expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("text", PATTERNS)
def test_float32_greedy_tokens(client_and_oracle: tuple[Client, Oracle], text: str) -> None:
    client, oracle = client_and_oracle
    pattern = Pattern(text)
    client.switch_pattern(text)
    checked = 0
    for seed in range(60):
        ids = prompt(150, 1000 + seed)
        checked += is_greedy(oracle, ids, greedy(client, ids, 64), pattern)
        if checked == 2:
            return
    raise AssertionError("no prompt without a near-tie")


def test_bfloat16_logprobs_where_nothing_is_left_out(tmp_path: Path, serve: Serve) -> None:
    """There are no near-ties to blame where nothing is selected: every single token must agree.

    The checkpoint has no experts, whose choice would be another.
    """
    fields = {"first_k_dense_replace": 6}
    make_model(tmp_path, size="tiny", vocab_size=VOCAB, fields=fields)
    oracle = Oracle(tmp_path, torch.bfloat16, index_topk=512)
    override = ["--json-model-override-args", '{"index_topk": 512}']
    arguments = ("--dtype", "bfloat16", "--indexcache-pattern", "FSSSFS", *override)
    with serve(tmp_path, *arguments) as client:
        for length in LENGTHS[1:]:
            ids = prompt(length, 7)
            expected = oracle.answer(ids, Pattern("FSSSFS")).logprobs
            torch.testing.assert_close(logprobs(client, ids), expected, rtol=0, atol=0.02)


@pytest.fixture(scope="module", params=["glm-5", "deepseek-v3.2"])
def served_fp8(
    request: pytest.FixtureRequest, checkpoints: dict[str, Path], serve: Serve
) -> Iterator[tuple[Client, Oracle]]:
    folder = checkpoints[request.param]
    arguments = ["--dtype", "float32", "--indexcache-index-k-dtype", "fp8_e4m3"]
    with serve(folder, *arguments, "--indexcache-pattern", "FFSSFS") as client:
        yield client, Oracle(folder, torch.float32, fp8_indexer=True)


def test_fp8_index_keys(served_fp8: tuple[Client, Oracle]) -> None:
    """The GPU's quantisation decides other selections than float32, and the same as the oracle's.

    e4m3 puts many scores on few values, so prompts whose boundary is a tie are common.
    """
    client, oracle = served_fp8
    pattern = Pattern("FFSSFS")
    assert client.states()[0].index_k_bytes_per_token == 3 * (128 + 4)
    unquantised = Oracle(oracle.folder, torch.float32)
    for length in (1, 64, 65, 130, 160):
        ids, expected = steady_prompt(oracle, length, pattern)
        answer = logprobs(client, ids)
        torch.testing.assert_close(answer, expected, rtol=0, atol=1e-3)
    assert (answer - unquantised.answer(ids, pattern).logprobs).abs().max() > 1e-3
