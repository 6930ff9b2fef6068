"""The paper's scripts ask the command line for what it has, and write where they say."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import typer

from benchmarks.paper import shares, similarity, table_1, table_2, table_4
from sglang_indexcache.cli import app

SCRIPTS = {
    shares: ["demo model", "bench latency"],
    table_1: ["demo model", "bench latency"],
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
    monkeypatch.setattr(table_4, "live_server", no_server)
    script.main([*quick, "--output", str(tmp_path)])  # type: ignore[attr-defined]
    assert said == SCRIPTS[script]  # type: ignore[index]


def test_table_2_compares_documents_with_the_first_pattern(tmp_path: Path) -> None:
    given = ["--quick", "--rows", "2", "--length", "192", "--pattern", "full", "1/4"]
    table_2.main([*given, "--output", str(tmp_path / "out")])
    found = json.loads((tmp_path / "out.json").read_text())
    full, quarter = found["rows"]
    assert full["text"]["over_first"] == 0
    for task in table_2.TASKS:
        over = quarter[task]["mean"] - full[task]["mean"]
        assert quarter[task]["over_first"] == pytest.approx(over)
    assert (tmp_path / "out.md").read_text().count("\n") == 2 + 2 + 1


def test_similarity_shows_what_it_found_beside_the_others(tmp_path: Path) -> None:
    given = ["--quick", "--rows", "2", "--length", "192", "--output", str(tmp_path / "out")]
    similarity.main(given)
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    names = [re.sub(r", [FS]{12}$", "", line["name"]) for line in rows]
    assert names == [
        *("full", "uniform:1/2", "1/2 by similarity", "1/2"),
        *("uniform:1/4", "1/4 by similarity", "1/4"),
    ]
