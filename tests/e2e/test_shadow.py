"""What a server's shadow says of the small checkpoint: transformers' overlap; no answer moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_indexcache.ask.client import Client
from sglang_indexcache.ask.protocol import RECENT, Overlaps
from sglang_indexcache.demo import shipped_checkpoint
from sglang_indexcache.demo.material import Material
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.calibration import Calibration
from sglang_indexcache.search.evaluators.hf import TransformersEvaluator
from sglang_indexcache.search.overlap import OverlapCounter, by_layer
from tests.e2e.conftest import Serve, check_metrics, logprobs

PATTERN = Pattern("FSSSFSSSFSSS")
FLAGS = ("--dtype", "float32", "--indexcache-pattern", str(PATTERN), "--max-total-tokens", "16384")
CHUNKS = ("--chunked-prefill-size", "64", "--disable-radix-cache", "--enable-metrics")
"""A forward for every 64 rows, of which 16 are looked at."""
SHADOW = ("--indexcache-shadow", "1")
LIVE = ("--indexcache-mode", "live")


@pytest.fixture(scope="module")
def model() -> Path:
    return shipped_checkpoint()


@pytest.fixture(scope="module")
def prompts(model: Path) -> list[list[int]]:
    return [list(question.prompt) for question in Material(model).questions(6, length=480)]


@pytest.fixture(scope="module")
def measured(model: Path, prompts: list[list[int]]) -> OverlapCounter:
    """What ``search overlap`` measures on these prompts, in runs of the pattern."""
    sequences = tuple(map(tuple, prompts))
    evaluator = TransformersEvaluator(model, Calibration(sequences, 1, "test"))
    counter = OverlapCounter(len(PATTERN), evaluator.topk)
    for ids in sequences:
        counter.add(evaluator.selected(ids, PATTERN))
    return counter


def answers(client: Client, prompts: list[list[int]]) -> list[Any]:
    """Of every prompt each token's log-probability, and 12 greedy tokens with theirs."""
    sampling = {"max_new_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    replies = [
        client.generate(input_ids=ids, sampling_params=sampling, return_logprob=True)
        for ids in prompts
    ]
    return [
        (logprobs(client, ids).tolist(), reply["meta_info"]["output_token_logprobs"])
        for ids, reply in zip(prompts, replies, strict=True)
    ]


@pytest.fixture(scope="module")
def plain(model: Path, serve: Serve, prompts: list[list[int]]) -> list[Any]:
    """The answers of a server without a shadow."""
    with serve(model, *FLAGS, *CHUNKS, *LIVE) as client:
        said = answers(client, prompts)
        assert client.states()[0].overlap == Overlaps()
        return said


@pytest.mark.parametrize("mode", ["live", "static"])
def test_overlap_is_that_of_transformers_and_answers_keep_their_bits(
    model: Path,
    serve: Serve,
    prompts: list[list[int]],
    measured: OverlapCounter,
    plain: list[Any],
    mode: str,
) -> None:
    with serve(model, *FLAGS, *CHUNKS, *SHADOW, "--indexcache-mode", mode) as client:
        assert answers(client, prompts) == plain
        found = client.states()[0].overlap
        check_metrics(client)
    expected, recent = by_layer(measured.matrix(), PATTERN), measured.recent()
    compared = [
        layer for layer in range(1, len(PATTERN)) if PATTERN.is_full(layer) == (mode == "static")
    ]
    assert sorted(int(name.split()[0]) for name in found.cells) == compared
    for layer in compared:
        rows, overlap, recall, *held, least, least_recall = found.cells[f"{layer} 2Ki"]
        assert rows > 1000
        share = expected[layer]
        assert share is not None
        # What follows from chance at most: as if each row's share were 0 or 1, and four of the
        # rows were one, as 16 of 64 are looked at.
        error = 2 * np.sqrt(share * (1 - share) / (rows / 4))
        print(f"layer {layer}: {overlap / rows:.4f} against {share:.4f} +- {error:.4f}")
        assert overlap / rows == pytest.approx(share, abs=error)
        assert least < share
        if mode == "live":
            assert overlap / rows < recall / rows <= 1
            assert 0 < least_recall < recall / rows
        source = PATTERN.source_of(layer if mode == "live" else layer - 1)
        for place in range(len(RECENT)):
            told = held[place] / rows
            error = 2 * np.sqrt(recent[place, source] * (1 - recent[place, source]) / (rows / 4))
            assert told == pytest.approx(recent[place, source], abs=error + 1e-6)
