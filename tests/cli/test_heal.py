"""``indexcache heal`` as a user types it."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from sglang_indexcache.cli import app
from sglang_indexcache.serving.adapters.folder import Adapter
from tests.lab.heal.checkpoints import checkpoint, requantise


@pytest.fixture
def runner() -> CliRunner:
    return CliRunner()


def test_heal(runner: CliRunner, tmp_path: Path) -> None:
    checkpoint(tmp_path / "base")
    heal = ["heal", "run", "--model", str(tmp_path / "base"), "--data", "machine", "-o"]
    heal += [str(tmp_path / "adapter"), "--dense-steps", "1", "--held-out", "1"]
    result = runner.invoke(app, [*heal, "--pattern", "FSSF", "--context", "24", "--rows", "1"])
    assert result.exit_code == 0, result.output
    assert str(Adapter.read(tmp_path / "adapter").pattern) == "FSSF"
    refusal = runner.invoke(app, [*heal, "--pattern", "FSS"])
    assert refusal.exit_code == 1
    assert refusal.output.startswith("indexcache: error: ")


def test_a_checkpoint_in_another_form_is_refused_before_anything_is_read(
    runner: CliRunner, tmp_path: Path
) -> None:
    """The dry run took any for block FP8 ("it fits"), and the run asked to download it again."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    checkpoint(base)
    heal = ["heal", "run", "--model", str(base), "--data", "machine", "-o", str(adapter)]
    heal += ["--dense-steps", "1", "--held-out", "1", "--pattern", "FSSF", "--context", "24"]
    assert runner.invoke(app, heal).exit_code == 0
    requantise(base, {"quant_method": "awq", "bits": 4})
    nothing = str(tmp_path / "nothing.jsonl")
    heal[5], heal[7] = nothing, str(tmp_path / "other")
    search = ["search", "run", "--model", str(base), "--data", nothing, "-o", str(tmp_path / "s")]
    compare = ["search", "compare", "full", "FSSF", *search[2:]]
    merge = ["heal", "merge", str(adapter), "--model", str(base), "-o", str(tmp_path / "merged")]
    for command in (heal, [*heal, "--dry-run", "8xh200"], search, compare, merge):
        result = runner.invoke(app, command)
        assert result.exit_code == 1, command
        text = " ".join(result.output.split())
        assert "base is quantised: awq 4. Plain weights and block FP8" in text, command
        assert "take the model's bfloat16 or block-FP8 checkpoint" in text


@pytest.mark.parametrize("gpu", ["h100", "h200", "b200"])
def test_a_dry_run_knows_the_data_sheets(runner: CliRunner, tmp_path: Path, gpu: str) -> None:
    checkpoint(tmp_path / "base")
    heal = [
        "heal",
        "run",
        "--model",
        str(tmp_path / "base"),
        "--data",
        "machine",
        "--pattern",
        "FSSF",
    ]
    heal += ["-o", str(tmp_path / "adapter"), "--context", "24", "--dry-run"]
    result = runner.invoke(app, [*heal, f"2x{gpu}"])
    assert result.exit_code == 0, result.output
    assert "it fits" in result.output
    assert not (tmp_path / "adapter.run").exists()
    for name, why in (("2xa100", "no rates are known for 'a100'"), ("h200", "got 'h200'")):
        assert why in runner.invoke(app, [*heal, name]).output


def test_an_interrupted_run_says_how_it_goes_on(
    runner: CliRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sglang_indexcache.lab.heal.heal.heal", interrupted)
    heal = [
        "heal",
        "run",
        "--model",
        str(tmp_path),
        "--data",
        "machine",
        "-o",
        str(tmp_path / "adapter"),
    ]
    result = runner.invoke(app, [*heal, "--pattern", "FS"])
    assert result.exit_code != 0
    text = result.output.replace("\n", "")
    assert f"{tmp_path / 'adapter.run'}; the same command continues" in text
