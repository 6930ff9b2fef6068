from __future__ import annotations

from base64 import b64encode
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_indexcache.errors import SearchError, ServerError
from sglang_indexcache.lab.client.pool import Pool
from sglang_indexcache.lab.search import lists
from sglang_indexcache.lab.search.calibration import Calibration
from sglang_indexcache.lab.search.lists import (
    OverlapCounter,
    ReturningEvaluator,
    returned_lists,
)
from sglang_indexcache.lab.search.methods import METHODS_OF_SERVERS
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.protocol import PATTERN_OF_REQUEST
from tests.fakes import state
from tests.lab.search.helpers import searched
from tests.lab.search.oracle import every_pattern, source


def selections(seed: int, layers: int, length: int, k: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    lists = np.full((layers, length, k), -1)
    for layer in range(layers):
        for query in range(length):
            count = min(k, query + 1)
            lists[layer, query, :count] = random.permutation(query + 1)[:count]
    return lists


def test_counting_in_pieces_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = selections(3, 4, 40, 6)
    at_once, pieces = OverlapCounter(4, 6), OverlapCounter(4, 6)
    at_once.add(sample)
    monkeypatch.setattr(lists, "_MASK_BYTES", 1)
    pieces.add(sample)
    assert at_once.matrix() == pytest.approx(pieces.matrix(), abs=1e-12)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10**6), size=st.integers(1, 12), k=st.integers(1, 5))
def test_blocks_of_the_queries_that_count(seed: int, size: int, k: int) -> None:
    counted = np.random.default_rng(seed).random(12) < 0.5
    counted[k] = True
    sample, counter = selections(seed, 3, 12, k), OverlapCounter(3, k)
    for start in range(0, 12, size):
        counter.add(sample[:, start : start + size], start, counted)
    queries = [t for t in range(k, 12) if counted[t]]
    for i, j in np.ndindex(3, 3):
        shares = [len({*sample[i, t]} & {*sample[j, t]}) / k for t in queries]
        assert counter.matrix()[i, j] == pytest.approx(np.mean(shares), abs=1e-6)
    assert counter.queries == len(queries)


def test_nothing_to_count() -> None:
    counter = OverlapCounter(2, 8)
    counter.add(selections(0, 2, 8, 8))
    with pytest.raises(SearchError, match=r"more than 8 tokens .*longer context"):
        counter.matrix()


# -- from a server ---------------------------------------------------------------------------------

IDS = tuple(range(10))
TOPK = 4


class Returning:
    """A server of four layers, of which 0 and 2 have an indexer."""

    name = "the server at nowhere"
    cached = 0

    def __init__(self, lists: np.ndarray | None) -> None:
        self.lists = lists

    def generate(self, **body: Any) -> list[dict[str, Any]]:
        assert body["return_indexer_topk"] is True
        assert body["logprob_start_len"] == [0]  # so SGLang reads nothing from its cache
        info: dict[str, Any] = {"prompt_tokens": len(IDS), "cached_tokens": self.cached}
        if self.lists is not None:
            info["indexer_topk"] = b64encode(self.lists.astype(np.int32).tobytes()).decode()
        return [{"meta_info": info}]


CHECKPOINT: Any = SimpleNamespace(
    layer_ids=(0, 2), shape={"index_topk": TOPK}, own=Pattern("FF"), num_layers=2
)


def as_returned(picks: np.ndarray) -> np.ndarray:
    """Return ``[tokens, 4, k]``: as SGLang returns them, with layers that have no indexer."""
    rows = np.zeros((len(IDS), 4, TOPK), dtype=np.int32)
    rows[:, [0, 2]] = picks.transpose(1, 0, 2)
    return rows


@pytest.mark.parametrize("block_bytes", [1, 64 << 20])
def test_a_servers_lists_are_those_of_its_indexers(
    block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lists, "_BLOCK_BYTES", block_bytes)
    picks = selections(1, 2, len(IDS), TOPK)
    server: Any = Returning(as_returned(picks))
    blocks = [*returned_lists(server, CHECKPOINT, "", IDS)]
    assert [start for start, _ in blocks] == ([0, 3, 6, 9] if block_bytes == 1 else [0])
    assert (np.concatenate([lists for _, lists in blocks], axis=1) == picks).all()


def test_lists_from_a_cache_are_refused() -> None:
    server: Any = Returning(as_returned(selections(1, 2, len(IDS), TOPK)))
    server.cached = 3
    with pytest.raises(ServerError, match=r"took 3 tokens .* Start it with --disable-radix-cache"):
        [*returned_lists(server, CHECKPOINT, "", IDS)]


def spoiled(change: str) -> np.ndarray | None:
    lists = as_returned(selections(1, 2, len(IDS), TOPK))
    if change == "slots":
        lists[lists >= 0] += 64
    if change == "zeros":
        lists[-2] = 0
    if change == "width":
        lists = lists[:, :2]
    return None if change == "nothing" else lists


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("slots", "SGLANG_DSA_FUSE_TOPK=0"),
        ("zeros", "something else than positions"),
        ("width", "no lists of 4"),
        ("nothing", "Start it with --enable-return-indexer-topk"),
    ],
)
def test_what_is_no_list_is_refused(
    change: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server: Any = Returning(spoiled(change))
    monkeypatch.setattr(lists, "_BLOCK_BYTES", 1)
    with pytest.raises(ServerError, match=says):
        [*returned_lists(server, CHECKPOINT, "", IDS)]


# -- a search by what servers return ---------------------------------------------------------------

LAYERS = 6
PROMPTS = tuple(tuple(np.random.default_rng(n).integers(0, 2, n).tolist()) for n in (40, 33, 36))
"""A text of two words: most of what is written was written before."""
COUNTED = tuple(np.random.default_rng(2).random(len(ids) - 1) < 0.5 for ids in PROMPTS)
TOGETHER: Any = SimpleNamespace(
    layer_ids=tuple(range(LAYERS)),
    shape={"index_topk": TOPK},
    own=Pattern.full(LAYERS),
    architecture="GlmMoeDsaForCausalLM",
)


class LiveServer:
    """A live server of six layers; its lists hang on the prompt, its losses on the pattern."""

    name = "the server at nowhere"

    def __init__(self, *, returns: bool = True) -> None:
        self.returns, self.asked = returns, list[tuple[int, ...]]()

    def states(self) -> list[Any]:
        return [state("F" * LAYERS, "live", architecture="GlmMoeDsaForCausalLM")]

    def generate(self, *, timeout: float | None = None, **body: Any) -> list[dict[str, Any]]:
        assert timeout
        return [
            {"meta_info": self.answer(tuple(ids), sampling["custom_params"], body)}
            for ids, sampling in zip(body["input_ids"], body["sampling_params"], strict=True)
        ]

    def answer(
        self, ids: tuple[int, ...], named: dict[str, str], body: dict[str, Any]
    ) -> dict[str, Any]:
        pattern = named[PATTERN_OF_REQUEST]
        info: dict[str, Any] = {"prompt_tokens": len(ids), "cached_tokens": 0}
        info[PATTERN_OF_REQUEST] = [pattern]
        info["input_token_logprobs"] = [[-1.0 - pattern.count("S"), t, None] for t in ids]
        if number := body.get("top_logprobs_num"):
            likely = [[-2.0 - n - 0.1 * pattern.count("S"), 10 + n, None] for n in range(number)]
            info["input_top_logprobs"] = [None, *([likely] * (len(ids) - 1))]
        if "return_indexer_topk" in body:
            assert pattern == "F" * LAYERS
            self.asked.append(ids)
            lists = picks_for(ids).transpose(1, 0, 2).astype(np.int32)
            if self.returns:
                info["indexer_topk"] = b64encode(lists.tobytes()).decode()
        return info


def picks_for(ids: tuple[int, ...]) -> np.ndarray:
    """Neighbouring layers have more in common than distant ones."""
    picks = selections(len(ids), LAYERS, len(ids), TOPK)
    alike = np.random.default_rng(len(ids)).random((LAYERS, len(ids))) < 0.5
    for layer in range(1, LAYERS):
        picks[layer, alike[layer]] = picks[layer - 1, alike[layer]]
    return picks


def returning(server: LiveServer) -> ReturningEvaluator:
    kinds = tuple(mask.astype(np.uint8) for mask in COUNTED)
    data = Calibration(PROMPTS, "test", kinds=kinds)
    return ReturningEvaluator(Pool([server]), data, TOGETHER)


def keeps(layer: int, source: int, prompt: int) -> float:
    """Count by hand what a layer keeps under another's list, where it counts."""
    common, lost = [], []
    ids, counted = PROMPTS[prompt], COUNTED[prompt]
    mine, theirs = picks_for(ids)[layer], picks_for(ids)[source]
    text = "".join(map(str, ids))
    for t in range(TOPK, len(ids) - 1):
        if counted[t]:
            common.append(len({*mine[t]} & {*theirs[t]}) / TOPK)
            begin = text.rfind(text[t - 3 : t + 1], 0, t)  # the last four tokens, before
            places = [begin + 3, begin + 4] if begin >= 0 else []
            lost += [place in mine[t] and place not in theirs[t] for place in places]
    assert 10 < len(lost) < 2 * len(common)
    return float(np.mean(common) - np.mean(lost))


def test_one_pass_over_a_server_finds_the_best_of_all_patterns_once(tmp_path: Path) -> None:
    server = LiveServer()
    search, output = searched(
        tmp_path, returning(server), "1/2", "2", method="one-pass", methods=METHODS_OF_SERVERS
    )
    assert server.asked == list(PROMPTS)
    tokens = [40, 33, 36]

    def total(text: str) -> float:
        layers = [(i, source(text, i)) for i in range(LAYERS) if text[i] == "S"]
        sums = [sum(keeps(*pair, batch) for pair in layers) for batch in range(3)]
        return float(np.average(sums, weights=tokens))

    for full in (3, 2):
        best = max(map(total, every_pattern(LAYERS, full)))
        assert total(str(search.found[full].pattern)) == pytest.approx(best, abs=1e-9)
    assert "what each layer keeps of its list" in output
    assert sum(tokens) == search.search_tokens
    again, _ = searched(
        tmp_path, returning(server), "1/2", "2", method="one-pass", methods=METHODS_OF_SERVERS
    )
    assert server.asked == list(PROMPTS)
    assert [*map(str, again.found.values())] == [*map(str, search.found.values())]


def test_the_default_over_a_server_runs_what_its_lists_propose(tmp_path: Path) -> None:
    server = LiveServer()
    search, output = searched(
        tmp_path, returning(server), "1/2", method="proposals", methods=METHODS_OF_SERVERS
    )
    [found] = [found for found in search.found.values() if found.mark.label == "1/2"]
    assert found.judged is not None
    assert found.judged.kl["text"] >= 0
    assert "1/2 on the 3 documents that chose it: KL to all F text " in output
    assert "that a regression chooses, in proposals by what each layer keeps" in output


def test_a_server_that_returns_no_lists_is_refused_before_anything_is_measured(
    tmp_path: Path,
) -> None:
    with pytest.raises(ServerError, match="Start it with --enable-return-indexer-topk"):
        searched(
            tmp_path,
            returning(LiveServer(returns=False)),
            "1/2",
            method="one-pass",
            methods=METHODS_OF_SERVERS,
        )
    assert (tmp_path / "journal.jsonl").read_text().count("\n") == 1
