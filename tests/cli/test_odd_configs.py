"""A ``config.json`` with a field of another type: one line that names it, from every command."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sglang_indexcache.cli import app
from sglang_indexcache.lab.demo import shipped_checkpoint

OURS = {"num_hidden_layers": "12"}
TRANSFORMERS = {"attention_bias": "no"}
"""A field that this package does not read."""

READING = {
    "patterns list": (),
    "patterns show 1/2": (),
    "bench latency": ("-o", "out"),
    "eval run 1/2": ("--dry-run",),
    "search run": ("-o", "out", "--batches", "2"),
    "heal run": ("-o", "out", "--data", "machine", "--pattern", "uniform:1/2"),
    "heal run ": ("-o", "out", "--data", "machine", "--pattern", "1/2", "--dry-run", "1xh200"),
}
"""By command: what else it needs."""
WITH_TRANSFORMERS = [name for name in READING if name.split()[0] in ("eval", "search", "heal")]


def edited(folder: Path, fields: dict[str, Any]) -> Path:
    """Return the shipped checkpoint with these fields."""
    model = folder / "model"
    shutil.copytree(shipped_checkpoint(), model)
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return model


@pytest.mark.parametrize(
    ("command", "fields"),
    [(name, OURS) for name in READING] + [(name, TRANSFORMERS) for name in WITH_TRANSFORMERS],
)
def test_one_line_names_the_field(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, fields: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = edited(tmp_path, fields)
    model_option = ("--model", str(model))
    result = CliRunner().invoke(app, [*command.split(), *model_option, *READING[command]])
    assert result.exit_code == 1, (result.output, result.exception)
    assert isinstance(result.exception, SystemExit)
    [error] = [
        line for line in result.output.split("indexcache: error: ") if next(iter(fields)) in line
    ]
    assert error.count("\n") == 1
