"""The paper's scripts ask the command line for what it has, and write where they say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.paper import table_1, table_2, table_4
from sglang_indexcache.cli import app
from sglang_indexcache.search.calibration import Calibration
from tests.search.oracle import every_pattern, source

SCRIPTS = {
    table_1: ["bench latency"],
    table_4: ["eval run"],
}


def parsed(words: list[str]) -> str:
    """The command's name, after its options were held against the command line."""
    group, name, *rest = words
    command = typer.main.get_command(app).commands[group].commands[name]  # type: ignore[attr-defined]
    command.make_context(name, list(rest), resilient_parsing=False).close()
    return f"{group} {name}"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__.split(".")[-1])
@pytest.mark.parametrize("quick", [["--quick"], []], ids=["quick", "whole"])
def test_the_commands_exist_with_these_options(
    script: object, quick: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    @contextmanager
    def no_server(_model: Path, _log: Path) -> Iterator[str]:
        yield "http://127.0.0.1:1"

    def taken(*words: object) -> None:
        said.append(parsed([str(word) for word in words]))

    for module in (table_1, table_4):
        monkeypatch.setattr(module, "indexcache", taken)
    monkeypatch.setattr(table_1, "make_model", lambda *_, **__: None)
    monkeypatch.setattr(table_4, "live_server", no_server)
    script.main([*quick, "--output", str(tmp_path)])  # type: ignore[attr-defined]
    assert said == SCRIPTS[script]  # type: ignore[index]


def test_table_2_compares_documents_with_all_f(tmp_path: Path) -> None:
    given = ["--quick", "--rows", "2", "--length", "192", "--ratios", "1/4", "--batches", "1"]
    table_2.main([*given, "--output", str(tmp_path / "out")])
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    ways = [f"1/4 {way}" for way in ("interleaved", "by similarity", "searched")]
    assert [row["name"] for row in rows] == ["all F", *ways]
    assert all(row["pattern"].count("F") == 3 for row in rows[1:])
    assert rows[0]["text"]["over_first"] == 0
    for task in table_2.TASKS:
        over = rows[3][task]["mean"] - rows[0][task]["mean"]
        assert rows[3][task]["over_first"] == pytest.approx(over)
    assert (tmp_path / "out.md").read_text().count("\n") == 2 + 4 + 1


@settings(deadline=None, max_examples=60)
@given(count=st.integers(1, 9), seed=st.integers(0, 10**6), data=st.data())
def test_the_most_similar_pattern_is_the_best_of_all(
    count: int, seed: int, data: st.DataObject
) -> None:
    full = data.draw(st.integers(1, count))
    matrix = np.random.default_rng(seed).uniform(-1, 1, (count, count))

    def total(text: str) -> float:
        shared = (i for i, c in enumerate(text) if c == "S")
        return float(sum(matrix[layer, source(text, layer)] for layer in shared))

    found = table_2.most_similar(matrix, full)
    assert len(found.full_layers) == full
    best = max(total(text) for text in every_pattern(count, full))
    assert total(str(found)) == pytest.approx(best, abs=1e-12)


def similarities(*lengths: int) -> np.ndarray:
    sequences = [tuple(np.random.default_rng(n).integers(10, 500, n).tolist()) for n in lengths]
    data = Calibration(tuple(sequences), 1, "test")
    return table_2.Similarity(table_2.SMALL, data).matrix(range(len(sequences)))


def test_similarity_is_the_mean_over_all_queries_and_one_where_everything_is_selected() -> None:
    lengths = (120, 70, 60)
    whole, alone = similarities(*lengths), [similarities(one) for one in lengths]
    assert whole == pytest.approx(np.average(alone, axis=0, weights=lengths), abs=1e-6)
    assert np.array_equal(whole, np.tril(whole))
    assert np.array_equal(np.diag(whole), np.ones(12))
    assert (whole[np.tril_indices(12, -1)] < 1).all()
    below = alone[2][np.tril_indices(12)]  # 60 tokens, index_topk 64: each selects all of them
    assert below == pytest.approx(1.0, abs=1e-6)
