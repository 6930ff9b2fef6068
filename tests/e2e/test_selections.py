"""``--enable-return-indexer-topk``: answers carry what layers used, S layers their F layer's."""

from __future__ import annotations

import json
import os
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sglang_indexcache.ask.client import Client
from sglang_indexcache.ask.protocol import named
from sglang_indexcache.pattern import Pattern
from tests.cli.test_search import TINY, call, said
from tests.e2e.conftest import Serve, prompt
from tests.oracle import _recorded_margins

TOPK = 64
ARGUMENTS = ("--dtype", "float32", "--max-total-tokens", "8192", "--enable-return-indexer-topk")
CHUNK = ("--chunked-prefill-size", "128")


def used(client: Client, ids: list[int], count: int, pattern: str = "") -> np.ndarray:
    """``[layers, tokens, k]`` of a prompt and of what was generated behind it, but the last."""
    sampling = {"max_new_tokens": count, "temperature": 0.0, "ignore_eos": True}
    reply = client.generate(
        input_ids=ids,
        sampling_params=sampling | (named(pattern) if pattern else {}),
        return_indexer_topk=True,
    )
    found = np.frombuffer(b64decode(reply["meta_info"]["indexer_topk"]), dtype=np.int32)
    return found.reshape(len(ids) + count - 1, -1, TOPK).transpose(1, 0, 2)


def check(found: np.ndarray, pattern: Pattern) -> None:
    """Every list is of tokens that its query sees; S layers have their F layer's."""
    for layer, source in enumerate(pattern.sources):
        assert (found[layer] == found[source]).all()
    for query in range(found.shape[1]):
        for layer in pattern.full_layers:
            chosen = [token for token in found[layer, query] if token >= 0]
            assert len(set(chosen)) == len(chosen) == min(query + 1, TOPK)
            assert max(chosen) <= query
    pairs = zip(pattern.full_layers, pattern.full_layers[1:], strict=False)
    assert all((found[a] != found[b]).any() for a, b in pairs)


@pytest.fixture(scope="module")
def tiny(serve: Serve) -> Iterator[Client]:
    with serve(TINY, *ARGUMENTS, *CHUNK, "--indexcache-mode", "live") as client:
        yield client


def test_requests_return_what_their_own_pattern_used(tiny: Client) -> None:
    """They do over chunks, decode steps and a prefix that comes from the cache."""
    ids = prompt(300, 7)
    for text in ("F" * 12, "FSSFSSFSSFSS"):
        first = used(tiny, ids, 6, text)
        check(first, Pattern(text))
        assert (used(tiny, ids, 6, text) == first).all()


def test_overlap_from_a_server_is_that_of_transformers(tiny: Client, tmp_path: Path) -> None:
    arguments = ("search", "overlap", "--model", TINY, "--context", "256", "--batches", "2")
    for name, more in (("local", ()), ("served", ("--url", tiny.url))):
        with _recorded_margins(TOPK, [], first_of_ties=True):  # transformers leaves ties open
            told = call(*arguments, *more, "-o", tmp_path / name)
        assert told.exit_code == 0, said(told)
    local, served = (
        json.loads((tmp_path / name / "overlap.json").read_text()) for name in ("local", "served")
    )
    assert served["queries"] == local["queries"] == 2 * (256 - TOPK)
    # A near-tie that rounding decides moves one entry of one list.
    assert np.abs(np.array(served["matrix"]) - local["matrix"]).max() < 1e-4


def test_static_mode(glm: Path, serve: Serve, tmp_path: Path) -> None:
    pattern = "FSSFSS"
    ranks = ("--tp", "2", "--dp", "2", "--enable-dp-attention")
    cores = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"} if (os.cpu_count() or 1) > 1 else {}
    with serve(glm, *ARGUMENTS, *ranks, "--indexcache-pattern", pattern, **cores) as client:
        for seed in range(3):
            check(used(client, prompt(150, seed), 4), Pattern(pattern))
        refused = call("search", "overlap", "--model", TINY, "--url", client.url, "-o", tmp_path)
        assert "these are two" in said(refused)
