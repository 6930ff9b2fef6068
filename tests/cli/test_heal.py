"""``indexcache heal`` as a user types it."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from sglang_indexcache.cli import app
from sglang_indexcache.serving.adapters.folder import Adapter
from tests.cli import output_of
from tests.lab.heal.checkpoints import checkpoint, requantise


def heal_run(folder: Path, output: str, *options: str, data: str = "machine") -> list[str]:
    """Return the command that heals the checkpoint under ``folder``."""
    model = ("--model", str(folder / "base"), "--data", data, "-o", str(folder / output))
    return ["heal", "run", *model, "--pattern", "FSSF", "--context", "24", *options]


FEW = ("--dense-steps", "1", "--held-out", "1")


def test_heal(tmp_path: Path) -> None:
    checkpoint(tmp_path / "base")
    output_of(*heal_run(tmp_path, "adapter", *FEW, "--rows", "1"))
    assert str(Adapter.read(tmp_path / "adapter").pattern) == "FSSF"
    refusal = output_of(*heal_run(tmp_path, "adapter", *FEW, "--pattern", "FSS"), code=1)
    assert refusal.startswith("indexcache: error: ")


def test_a_checkpoint_in_another_form_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    """The dry run took any for block FP8 ("it fits"), and the run asked to download it again."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    checkpoint(base)
    output_of(*heal_run(tmp_path, "adapter", *FEW))
    requantise(base, {"quant_method": "awq", "bits": 4})
    nothing = str(tmp_path / "nothing.jsonl")
    heal = heal_run(tmp_path, "other", *FEW, data=nothing)
    search = ["search", "run", "--model", str(base), "--data", nothing, "-o", str(tmp_path / "s")]
    compare = ["search", "compare", "full", "FSSF", *search[2:]]
    merge = ["heal", "merge", str(adapter), "--model", str(base), "-o", str(tmp_path / "merged")]
    for command in (heal, [*heal, "--dry-run", "8xh200"], search, compare, merge):
        text = output_of(*command, code=1)
        assert "base is quantised: awq 4. Plain weights and block FP8" in text, command
        assert "take the model's bfloat16 or block-FP8 checkpoint" in text


@pytest.mark.parametrize("gpu", ["h100", "h200", "b200"])
def test_a_dry_run_knows_the_data_sheets(tmp_path: Path, gpu: str) -> None:
    checkpoint(tmp_path / "base")
    heal = heal_run(tmp_path, "adapter", "--dry-run")
    assert "it fits" in output_of(*heal, f"2x{gpu}")
    assert not (tmp_path / "adapter.run").exists()
    for name, why in (("2xa100", "no rates are known for 'a100'"), ("h200", "got 'h200'")):
        assert why in output_of(*heal, name, code=1)


def test_an_interrupted_run_says_how_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sglang_indexcache.lab.heal.heal.heal", interrupted)
    result = CliRunner().invoke(app, heal_run(tmp_path, "adapter"))
    assert result.exit_code != 0
    text = result.output.replace("\n", "")
    assert f"{tmp_path / 'adapter.run'}; the same command continues" in text
