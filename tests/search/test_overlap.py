from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_indexcache.errors import LibraryError, SearchError
from sglang_indexcache.library import FoundOverlap, load_entry, set_overlap
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search import overlap
from sglang_indexcache.search.evaluators import hf
from sglang_indexcache.search.overlap import (
    RECENT,
    OverlapCounter,
    by_layer,
    read,
    recent_in_words,
    served_overlap,
)


def selections(seed: int, layers: int, length: int, k: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    found = np.full((layers, length, k), -1)
    for layer in range(layers):
        for query in range(length):
            count = min(k, query + 1)
            found[layer, query, :count] = random.permutation(query + 1)[:count]
    return found


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
    whole, pieces = OverlapCounter(4, 6), OverlapCounter(4, 6)
    whole.add(sample)
    monkeypatch.setattr(overlap, "_MASK_BYTES", 1)
    pieces.add(sample)
    assert whole.matrix() == pytest.approx(pieces.matrix(), abs=1e-12)


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


def test_reads_clusters_and_boundaries() -> None:
    matrix = blocks()
    matrix[1, 2] = matrix[2, 1] = 0.1
    reading = read(matrix)
    assert reading.clusters == (range(0, 2), range(2, 5), range(5, 6))
    assert reading.worst_boundary == (1, 2)
    assert reading.adjacent == (0.1, 0.9)
    assert "Clusters with at least 0.60 between all their layers: 0-1, 2-4." in reading.in_words()


def test_overlap_of_what_a_pattern_shares() -> None:
    assert served_overlap(blocks(), Pattern("FSFSSF")) == pytest.approx(0.9)
    assert served_overlap(blocks(), Pattern("FSSSSF")) == pytest.approx((0.9 + 3 * 0.2) / 4)
    assert np.isnan(served_overlap(blocks(), Pattern("FFFFFF")))


def test_each_layer_is_compared_with_the_list_that_stands_there() -> None:
    matrix = np.arange(36.0).reshape(6, 6)
    matrix = (matrix + matrix.T) / 100
    assert by_layer(matrix, Pattern("FSSFFS")) == (
        None, matrix[1, 0], matrix[2, 0], matrix[3, 0], matrix[4, 3], matrix[5, 4]
    )  # fmt: skip


class Selecting:
    """In place of transformers' evaluator: selections by pattern."""

    num_layers, topk = 3, 2

    def indices(self, pattern: Pattern, batch: int) -> Iterator[list[torch.Tensor]]:
        own = selections(batch, 3, 6, 2)
        own[1] = own[0] if pattern.is_full(1) else own[2]
        yield [torch.from_numpy(layer) for layer in own]


def test_a_file_says_what_a_run_of_its_own_pattern_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf, "TransformersEvaluator", Selecting)
    found = overlap.found_overlap(Selecting(), Pattern("FSF"), range(2), "two texts")  # type: ignore[arg-type]
    samples = [selections(batch, 3, 6, 2) for batch in range(2)]
    shares = [
        len({*sample[0, row]} & {*sample[2, row]}) / 2 for sample in samples for row in range(2, 6)
    ]
    mean = pytest.approx(np.mean(shares), abs=1e-4)
    assert found.layers == (None, mean, mean)  # under FSF layer 1 selects as layer 2
    assert (found.queries, found.data) == (8, "two texts")

    written = tmp_path / "mine.yaml"
    shipped = Path(__file__).parents[2] / "patterns" / "tiny-dsa-1of2.yaml"
    written.write_text(shipped.read_text() + "# a comment at the end\n")
    before = load_entry(written)
    layers = (None, *[0.5] * (before.model.num_layers - 1))
    for queries in (5, 7):  # the second replaces the first
        row = FoundOverlap(layers=layers, queries=queries)
        set_overlap(written, row)
        assert load_entry(written) == before.model_copy(update={"overlap": row})
    assert "# a comment at the end" in written.read_text()
    with pytest.raises(LibraryError, match="place for an overlap"):
        set_overlap(written, FoundOverlap(layers=(None,), queries=1))


@pytest.mark.parametrize("k", [1, 5])
def test_what_a_selection_holds_of_the_last_tokens(k: int) -> None:
    draw = np.random.default_rng(k)
    length, layers = 40, 3
    selected = np.full((layers, length, k), -1)
    for layer in range(layers):
        for query in range(length):
            chosen = draw.permutation(query + 1)[:k]
            selected[layer, query, : len(chosen)] = chosen
    counter = OverlapCounter(layers, k)
    counter.add(selected)
    found = counter.recent()
    for place, window in enumerate(RECENT):
        for layer in range(layers):
            shares = []
            for query in range(k, length):
                near = set(range(max(0, query + 1 - window), query + 1))
                shares.append(len(near & set(selected[layer, query].tolist())) / len(near))
            assert found[place, layer] == pytest.approx(np.mean(shares))
    told = recent_in_words(found, Pattern("FSF"))
    assert "layer   0" in told
    assert "layer   1" not in told
    assert f"{found[0, 2]:.0%}" in told
