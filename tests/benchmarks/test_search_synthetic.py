"""The simulation of searches: its landscapes are what they are called, its files are its own."""

import json

import numpy as np
import pytest

from benchmarks import search_synthetic as simulation
from benchmarks.records import RESULTS
from sglang_indexcache.pattern import Pattern


@pytest.mark.parametrize("layers", [47, 78])
def test_the_committed_summary_is_of_the_committed_rows(layers: int) -> None:
    record = json.loads((RESULTS / "search" / f"synthetic-{layers}.json").read_text())
    assert record["layers"] == layers
    assert json.loads(json.dumps(simulation.summarize(record["rows"]))) == record["summary"]
    for row in record["rows"]:
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
        landscape = simulation.Landscape(simulation.KINDS[kind], 20, batches, 7, data_seed)
        places = range(batches)
        losses = landscape.loss(pattern, places) - landscape.loss(Pattern.full(20), places)
        return np.asarray(losses)

    assert (added(0) == added(0)).all()
    first, second = added(0), added(1)
    assert (first != second).any()
    error = np.hypot(first.std(), second.std()) / np.sqrt(len(first))
    assert abs(first.mean() - second.mean()) < 5 * error


def test_every_search_is_compared_within_its_tokens() -> None:
    row = simulation.compare("base", 20, 5)
    assert list(row["searches"]) == list(simulation.SEARCHES)
    for search in row["searches"].values():
        assert set(search["added"]) == set(simulation.MARKS)
        assert all(value > 0 for value in search["added"].values())
