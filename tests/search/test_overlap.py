from __future__ import annotations

from base64 import b64encode
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_indexcache.ask.protocol import STATE
from sglang_indexcache.errors import LibraryError, SearchError, ServerError
from sglang_indexcache.library import FoundOverlap, load_entry, set_overlap
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search import overlap
from sglang_indexcache.search.overlap import (
    OverlapCounter,
    by_layer,
    check_one_list,
    overlap_in_words,
    served_lists,
)


def selections(seed: int, layers: int, length: int, k: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    lists = np.full((layers, length, k), -1)
    for layer in range(layers):
        for query in range(length):
            count = min(k, query + 1)
            lists[layer, query, :count] = random.permutation(query + 1)[:count]
    return lists


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10**6), layers=st.integers(1, 4), k=st.integers(1, 5))
def test_is_the_mean_share_of_common_tokens(seed: int, layers: int, k: int) -> None:
    samples = [selections(seed + i, layers, length, k) for i, length in enumerate((7, 12))]
    counter = OverlapCounter(layers, k)
    for sample in samples:
        counter.add(sample)
    matrix = counter.matrix()
    for i in range(layers):
        for j in range(layers):
            shares = [
                len(set(sample[i, t]) & set(sample[j, t])) / k
                for sample in samples
                for t in range(k, sample.shape[1])
            ]
            assert matrix[i, j] == pytest.approx(np.mean(shares), abs=1e-6)
    assert counter.queries == sum(s.shape[1] - k for s in samples)


def test_counting_in_pieces_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = selections(3, 4, 40, 6)
    at_once, pieces = OverlapCounter(4, 6), OverlapCounter(4, 6)
    at_once.add(sample)
    monkeypatch.setattr(overlap, "_MASK_BYTES", 1)
    pieces.add(sample)
    assert at_once.matrix() == pytest.approx(pieces.matrix(), abs=1e-12)


def test_lists_of_several_groups_are_not_counted_as_one() -> None:
    checkpoint: Any = SimpleNamespace(architecture="GlmMoeDsaForCausalLM")
    check_one_list(checkpoint)
    grouped: Any = SimpleNamespace(architecture="MiniMaxM3SparseForCausalLM")
    with pytest.raises(SearchError, match="each group of heads selects by itself"):
        check_one_list(grouped)


def test_nothing_to_count() -> None:
    counter = OverlapCounter(2, 8)
    counter.add(selections(0, 2, 8, 8))
    with pytest.raises(SearchError, match=r"more than 8 tokens .*longer context"):
        counter.matrix()


def blocks() -> np.ndarray:
    matrix = np.full((6, 6), 0.2)
    matrix[:2, :2] = matrix[2:5, 2:5] = 0.9
    np.fill_diagonal(matrix, 1.0)
    return matrix


def test_reads_the_sharpest_boundary() -> None:
    matrix = blocks()
    matrix[1, 2] = matrix[2, 1] = 0.1
    sentences = overlap_in_words(matrix)
    assert "have 0.10 to 0.90 of their selection" in sentences
    assert "The sharpest boundary is between layers 1 and 2 (0.10)." in sentences


def test_each_layer_is_compared_with_the_list_that_stands_there() -> None:
    matrix = np.arange(36.0).reshape(6, 6)
    matrix = (matrix + matrix.T) / 100
    assert by_layer(matrix, Pattern("FSSFFS")) == (
        None, matrix[1, 0], matrix[2, 0], matrix[3, 0], matrix[4, 3], matrix[5, 4]
    )  # fmt: skip


def test_a_file_says_what_a_run_of_its_own_pattern_shows(tmp_path: Path) -> None:
    def select(ids: tuple[int, ...], pattern: Pattern) -> np.ndarray:
        assert str(pattern) == "FSF"
        return selections(ids[0], 3, 6, 2)

    measured_overlap = overlap.found_overlap(select, Pattern("FSF"), [(4,), (5,)], 2, "two texts")
    samples = [selections(seed, 3, 6, 2) for seed in (4, 5)]

    def share(layer: int) -> Any:
        common = [
            len({*sample[0, row]} & {*sample[layer, row]})
            for sample in samples
            for row in range(2, 6)
        ]
        return pytest.approx(np.mean(common) / 2, abs=1e-4)

    assert measured_overlap.layers == (None, share(1), share(2))
    assert (measured_overlap.queries, measured_overlap.data) == (8, "two texts")
    blind = np.mean([2 / sees for sees in (3, 4, 5, 6)])
    assert measured_overlap.chance == pytest.approx(blind, abs=1e-4)
    beyond = [
        pytest.approx((s - blind) / (1 - blind), abs=1e-3) for s in measured_overlap.layers[1:] if s
    ]
    assert measured_overlap.beyond_chance == (None, *beyond)

    file = tmp_path / "mine.yaml"
    shipped = Path(__file__).parents[2] / "patterns" / "tiny-dsa-1of2.yaml"
    file.write_text(shipped.read_text() + "# a comment at the end\n")
    before = load_entry(file)
    layers = (None, *[0.5] * (before.model.num_layers - 1))
    for queries in (5, 7):  # the second replaces the first
        row = FoundOverlap(layers=layers, chance=0.25, queries=queries)
        set_overlap(file, row)
        assert load_entry(file) == before.model_copy(update={"overlap": row})
    assert "# a comment at the end" in file.read_text()
    with pytest.raises(LibraryError, match="place for an overlap"):
        set_overlap(file, FoundOverlap(layers=(None,), chance=0.25, queries=1))


# -- from a server ---------------------------------------------------------------------------------

IDS = tuple(range(10))
TOPK = 4


class Returning:
    """A server of four layers, of which 0 and 2 have an indexer; with IndexCache given a state."""

    name = "the server at nowhere"

    def __init__(self, lists: np.ndarray | None, **state: Any) -> None:
        self.lists, self.state = lists, state

    def server_info(self) -> dict[str, Any]:
        if not self.state:
            return {"internal_states": [{}]}
        report = {"version": "1", "policy": "FF", "source": "", "architecture": "A"}
        report |= {n: [] for n in ("indexer_selections", "index_reuses", "index_key_writes")}
        return {"internal_states": [{STATE: report | self.state}]}

    def generate(self, **body: Any) -> list[dict[str, Any]]:
        assert body["return_indexer_topk"] is True
        info: dict[str, Any] = {"prompt_tokens": len(IDS), "cached_tokens": 0}
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


def test_a_servers_lists_are_those_of_its_indexers() -> None:
    picks = selections(1, 2, len(IDS), TOPK)
    server: Any = Returning(as_returned(picks))
    assert (served_lists(server, CHECKPOINT)(IDS) == picks).all()


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
def test_what_is_no_list_is_refused(change: str, says: str) -> None:
    server: Any = Returning(spoiled(change))
    with pytest.raises(ServerError, match=says):
        served_lists(server, CHECKPOINT)(IDS)


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"checkpoint_pattern": "FFF", "mode": "live", "pattern": "FFF"}, "these are two"),
        ({"checkpoint_pattern": "FF", "mode": "static", "pattern": "FS"}, "Start it with --index"),
    ],
)
def test_a_server_that_cannot_show_it_is_refused(state: dict[str, str], says: str) -> None:
    server: Any = Returning(None, **state)
    with pytest.raises(ServerError, match=says):
        served_lists(server, CHECKPOINT)
