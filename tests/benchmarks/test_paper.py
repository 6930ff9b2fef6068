"""The paper's scripts ask the command line for what it has, and write where they say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import typer

from benchmarks.paper import table_1, table_2, table_4
from sglang_indexcache.cli import app

SCRIPTS = {
    table_1: ["bench latency"],
    table_4: ["eval run"],
}


def parsed(words: list[str]) -> str:
    """Return the command's name, after its options were held against the command line."""
    group, name, *options = words
    command = typer.main.get_command(app).commands[group].commands[name]  # type: ignore[attr-defined]
    command.make_context(name, list(options), resilient_parsing=False).close()
    return f"{group} {name}"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__.split(".")[-1])
@pytest.mark.parametrize("quick", [["--quick"], []], ids=["quick", "whole"])
def test_the_commands_exist_with_these_options(
    script: object, quick: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[str] = []

    @contextmanager
    def no_server(_model: Path, _log: Path) -> Iterator[str]:
        yield "http://127.0.0.1:1"

    def note(*words: object) -> None:
        commands.append(parsed([str(word) for word in words]))

    for module in (table_1, table_4):
        monkeypatch.setattr(module, "indexcache", note)
    monkeypatch.setattr(table_1, "make_model", lambda *_, **__: None)
    monkeypatch.setattr(table_4, "live_server", no_server)
    script.main([*quick, "--output", str(tmp_path)])  # type: ignore[attr-defined]
    assert commands == SCRIPTS[script]  # type: ignore[index]


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
