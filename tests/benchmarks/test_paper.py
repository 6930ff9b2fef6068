"""The paper's scripts ask the command line for what it has, and write where they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

from benchmarks.paper import table_1, table_2
from sglang_indexcache.cli import app


@pytest.mark.parametrize("quick", [["--quick"], []], ids=["quick", "whole"])
def test_the_command_exists_with_these_options(
    quick: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def note(*words: object) -> None:
        group, name, *options = map(str, words)
        command = typer.main.get_command(app).commands[group].commands[name]  # type: ignore[attr-defined]
        command.make_context(name, options, resilient_parsing=False).close()
        asked.append(f"{group} {name}")

    monkeypatch.setattr(table_1, "indexcache", note)
    monkeypatch.setattr(table_1, "make_model", lambda *_, **__: None)
    table_1.main([*quick, "--output", str(tmp_path)])
    assert asked == ["bench latency"]


def test_table_2_compares_documents_with_all_f(tmp_path: Path) -> None:
    options = ["--quick", "--rows", "2", "--length", "192", "--ratios", "1/4", "--batches", "1"]
    table_2.main([*options, "--output", str(tmp_path / "out")])
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    names = [f"1/4 {kind}" for kind in ("interleaved", "by similarity", "searched")]
    assert [row["name"] for row in rows] == ["all F", *names]
    assert all(row["pattern"].count("F") == 3 for row in rows[1:])
    assert rows[0]["text"]["over_first"] == 0
    for task in table_2.TASKS:
        over = rows[3][task]["mean"] - rows[0][task]["mean"]
        assert rows[3][task]["over_first"] == pytest.approx(over)
    assert (tmp_path / "out.md").read_text().count("\n") == 2 + 4 + 1
