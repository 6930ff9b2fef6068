"""Folded indexers on the CPU platform, against transformers' own code with a line for its ReLU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sglang_indexcache.ask.client import Client
from sglang_indexcache.ask.protocol import named
from sglang_indexcache.errors import ServerError
from sglang_indexcache.lab.evaluate.arms import Servers
from sglang_indexcache.lab.evaluate.plan import arms_of
from sglang_indexcache.lab.evaluate.tasks.context import Context, Question
from sglang_indexcache.library.slopes import Slopes
from sglang_indexcache.pattern import Pattern
from tests.e2e.conftest import (
    ROUNDING,
    Serve,
    decided_answer,
    decided_prompt,
    greedy,
    logprobs,
    prompt,
    steady_prompt,
)
from tests.oracle import Oracle
from tests.slopes import random_slopes

LETTERS = ("LLLLLL", "FLSLLS", "FFSSFS+c2", "FFFFFF+c4", "LSSFLS", "FSSSFS", "FFFFFF")
CHUNK = ("--chunked-prefill-size", "128")
SERVER = ("--dtype", "float32", "--max-total-tokens", "16384")


@pytest.fixture(scope="module")
def slopes(glm: Path, tmp_path_factory: pytest.TempPathFactory) -> Slopes:
    return random_slopes(glm, tmp_path_factory.mktemp("slopes") / "glm.slopes")


@pytest.fixture(scope="module")
def oracle(glm: Path, slopes: Slopes) -> Oracle:
    folding_oracle = Oracle(glm, torch.float32)
    folding_oracle.slopes = list(slopes.by_layer)
    return folding_oracle


@pytest.fixture(scope="module")
def patterns(slopes: Slopes) -> list[Pattern]:
    folding = ("L", "+c")
    return [
        Pattern(f"{text}@{slopes.digest}" if any(f in text for f in folding) else text)
        for text in LETTERS
    ]


@pytest.fixture(scope="module")
def client(glm: Path, serve: Serve, slopes: Slopes) -> Iterator[Client]:
    pattern = ("--indexcache-pattern", f"folded@{slopes.path}", "--indexcache-mode", "live")
    with serve(glm, *SERVER, *CHUNK, *pattern) as client:
        yield client


def test_chunked_prefill_is_the_oracles(
    client: Client, oracle: Oracle, patterns: list[Pattern]
) -> None:
    assert client.states()[0].pattern == str(patterns[0])
    for pattern in patterns:
        client.switch_pattern(str(pattern))
        assert client.states()[0].full_layers == len(pattern.full_layers)
        for length in (63, 66, 300):
            ids = decided_prompt(oracle, length, pattern, seed=400)
            expected = oracle.answer(ids, pattern).logprobs
            torch.testing.assert_close(logprobs(client, ids), expected, rtol=0, atol=1e-3)


def test_requests_of_one_batch_fold_each_in_its_way(
    client: Client, oracle: Oracle, patterns: list[Pattern]
) -> None:
    """Sent as one request: they are prefilled and decoded together."""
    client.flush_cache()
    before = client.states()[0].mixed_forwards
    prompts = [(pattern, *decided_answer(oracle, 200, 16, pattern, 2000)) for pattern in patterns]
    greedily = {"max_new_tokens": 16, "temperature": 0.0, "ignore_eos": True}
    replies = client.generate(
        input_ids=[ids for _, ids, _ in prompts],
        sampling_params=[greedily | named(str(pattern)) for pattern, _, _ in prompts],
    )
    for reply, (pattern, _, expected) in zip(replies, prompts, strict=True):
        assert reply["output_ids"] == expected, pattern
        assert reply["meta_info"]["indexcache_pattern"] == [str(pattern)]
    [state] = client.states()
    assert state.mixed_forwards > before
    kinds = {name.rpartition(" ")[2] for name, pairs in state.pairs.items() if pairs}
    assert kinds == {"scored", "folded", "skipped"}


def test_a_request_names_no_slopes_or_the_servers(client: Client, slopes: Slopes) -> None:
    ids = prompt(150, 3)
    greedily = {"max_new_tokens": 1, "temperature": 0.0}
    reply = client.generate(input_ids=ids, sampling_params=greedily | named("folded:1/3"))
    assert reply["meta_info"]["indexcache_pattern"] == [f"FLLFLL@{slopes.digest}"]
    with pytest.raises(ServerError, match="folds by other slopes than this server"):
        client.generate(input_ids=ids, sampling_params=greedily | named(f"LLLLLL@{'f' * 12}"))


def test_an_evaluation_asks_folded_layers_too(
    client: Client, glm: Path, oracle: Oracle, slopes: Slopes
) -> None:
    arms = arms_of(glm, "full", (f"FLSLLS@{slopes.path}",), "")
    assert [arm.name for arm in arms] == ["full", f"FLSLLS@{slopes.path.stem}", "uniform:1/4"]
    patterns = [Pattern(arm.pattern) for arm in arms]
    ids = decided_prompt(oracle, 150, *patterns)
    context = Context(
        "c", "notes", 150, ids[:140], [Question("q", ids[140:146], ids[146:], "", "", None)]
    )
    answers = Servers(arms, {"": client}).ask(context, [(arm, 0) for arm in arms])
    for ([row], _), pattern in zip(answers, patterns, strict=True):
        expected = oracle.answer(ids, pattern).logprobs[-4:].tolist()
        assert list(row.logprobs) == pytest.approx(expected, abs=1e-3), pattern
    assert len({row.trace for [row], _ in answers}) == len(arms)


@pytest.mark.parametrize(
    ("name", "exact", "index_k", "arguments"),
    [
        ("glm-5", (4,), "float32", ("--tp", "2")),
        ("deepseek-v3.2", (), "fp8_e4m3", ("--tp", "2", "--dp", "2", "--enable-dp-attention")),
    ],
    ids=["attention_tp_and_an_exact_layer", "dp_attention_and_fp8_keys"],
)
def test_static_mode(
    checkpoints: dict[str, Path],
    serve: Serve,
    tmp_path: Path,
    name: str,
    exact: tuple[int, ...],
    index_k: str,
    arguments: tuple[str, ...],
) -> None:
    """S layers take from L and from folded F layers, and what is cached is taken again."""
    folder, fp8 = checkpoints[name], index_k == "fp8_e4m3"
    slopes = random_slopes(folder, tmp_path / "some.slopes", exact=exact, seed=5)
    oracle = Oracle(folder, torch.float32, fp8_indexer=fp8)
    oracle.slopes = list(slopes.by_layer)
    text = "FSLSFS+c2"
    pattern = Pattern(f"{text}@{slopes.digest}")
    if fp8:  # a short one: the more rows, the more hang on a step of e4m3
        ids, expected = steady_prompt(oracle, 140, pattern)
    else:
        ids = decided_prompt(oracle, 301, pattern, seed=400)
        expected = oracle.answer(ids, pattern).logprobs
    flags: tuple[str, ...] = ("--indexcache-pattern", f"{text}@{slopes.path}")
    flags += ("--indexcache-index-k-dtype", index_k)
    ranks = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    with serve(folder, *SERVER, *CHUNK, *flags, *arguments, **ranks) as client:
        assert {state.pattern for state in client.states()} == {str(pattern)}
        torch.testing.assert_close(logprobs(client, ids), expected, rtol=0, atol=1e-3)
        tokens, gap = oracle.greedy(ids, 16, pattern)
        for _ in range(2):  # the second time from the cache
            assert fp8 or gap < ROUNDING or greedy(client, ids, 16) == tokens
        bytes_per_layer = 128 + 4 if fp8 else 512
        assert all(
            state.index_k_bytes_per_token == bytes_per_layer * 3 for state in client.states()
        )
