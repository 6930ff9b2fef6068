"""The simulation of searches: its landscapes are what they are called, its files are its own."""

import json

import numpy as np
import pytest

from benchmarks import search_synthetic as simulation
from benchmarks.records import RESULTS
from sglang_indexcache.pattern import Pattern


@pytest.mark.parametrize("layers", [47, 78])
def test_the_committed_summary_is_of_the_committed_rows(layers: int) -> None:
    found = json.loads((RESULTS / "search" / f"synthetic-{layers}.json").read_text())
    assert found["layers"] == layers
    assert json.loads(json.dumps(simulation.summarize(found["rows"]))) == found["summary"]
    for row in found["rows"]:
        paid = {name: s["evaluations_of_32_batches"] for name, s in row["searches"].items()}
        exhaustive = paid.pop("exhaustive")
        assert paid.pop("fast, 10x batches") <= exhaustive
        for name, evaluations in paid.items():
            is_double = name.startswith("both") and not name.endswith("half")
            assert evaluations <= (0.2 if is_double else 0.1) * exhaustive


@pytest.mark.parametrize("kind", simulation.KINDS)
def test_a_landscape_is_the_same_again_and_other_data_is_of_the_same_model(kind: str) -> None:
    pattern = Pattern.uniform(20, 4)

    def added(data_seed: int, batches: int = 2000) -> np.ndarray:
        made = simulation.Landscape(simulation.KINDS[kind], 20, batches, 7, data_seed)
        every = range(batches)
        found = made.loss(pattern, every) - made.loss(Pattern.full(20), every)
        return np.asarray(found)

    assert (added(0) == added(0)).all()
    first, other = added(0), added(1)
    assert (first != other).any()
    error = np.hypot(first.std(), other.std()) / np.sqrt(len(first))
    assert abs(first.mean() - other.mean()) < 5 * error


def test_every_search_is_compared_within_its_tokens() -> None:
    row = simulation.compare("base", 20, 5)
    assert list(row["searches"]) == list(simulation.SEARCHES)
    for search in row["searches"].values():
        assert set(search["added"]) == set(simulation.MARKS)
        assert all(value > 0 for value in search["added"].values())
