"""``indexcache heal`` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner

from sglang_indexcache.adapter import Adapter
from sglang_indexcache.cli import app
from tests.heal.checkpoints import checkpoint
from tests.heal.data.test_retrieval import solve
from tests.heal.recipes import tiny, write


@pytest.fixture
def runner() -> CliRunner:
    return CliRunner()


def test_run_then_evaluate(runner: CliRunner, tmp_path: Path) -> None:
    stages = [{**stage, "steps": 1} for stage in tiny()["stages"]]
    recipe = write(tmp_path / "recipe.yaml", stages=stages)
    arguments = ["train", "run", str(recipe), "-o", str(tmp_path / "run"), "--pattern", "FSSF"]
    done = runner.invoke(app, arguments)
    assert done.exit_code == 0, done.output
    checkpoint = str(tmp_path / "run" / "checkpoint")
    evaluate = ["train", "evaluate", "--model", checkpoint, "--context", "64"]
    scored = runner.invoke(app, [*evaluate, "--rows", "2", "--topk", "4"])
    assert scored.exit_code == 0, scored.output
    found = json.loads(scored.stdout)
    assert (found["pattern"], found["topk"]) == ("FSSF", 4)
    arguments = ["train", "data", "--model", checkpoint, "-o", str(tmp_path / "data")]
    assert runner.invoke(app, [*arguments, "--context", "64", "--rows", "2"]).exit_code == 0
    data = (tmp_path / "data" / "documents.jsonl").read_text()
    documents = [json.loads(line) for line in data.splitlines()]
    assert [d["task"] for d in documents] == ["text", "recall", "needles", "tracking"] * 2
    assert len({d["text"] for d in documents}) == 8
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    for d in documents:
        # Once they came out some tokens short, because cut text is read as other tokens.
        assert len(tokenizer(d["text"], add_special_tokens=False)["input_ids"]) == 64
        assert ("answers" in d) == (d["task"] != "text")
        for start, stop in d.get("answers", ()):
            assert solve(d["task"], d["text"][:start]) == d["text"][start:stop].strip()
    scored = runner.invoke(app, [*evaluate, "--rows", "1"])
    assert (
        json.loads(scored.stdout, parse_constant=pytest.fail)["tasks"]["recall"]["per_document_95"]
        is None
    )
    wrong = runner.invoke(app, [*evaluate, "--pattern", "FFFF"])
    assert wrong.exit_code == 1
    assert "ships no indexer weights" in wrong.output


def test_the_first_stages_only(runner: CliRunner, tmp_path: Path) -> None:
    stages = [{**stage, "steps": 1} for stage in tiny()["stages"]]
    recipe = write(tmp_path / "recipe.yaml", stages=stages)
    arguments = ["train", "run", str(recipe), "-o", str(tmp_path / "run"), "--stages"]
    assert runner.invoke(app, [*arguments, "1"]).exit_code == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert {json.loads(line)["stage"] for line in lines} == {0}
    assert (tmp_path / "run" / "checkpoint" / "config.json").exists()
    refused = runner.invoke(app, [*arguments, "9"])
    assert refused.exit_code == 1
    assert f"the recipe has 1 to {len(stages)}" in refused.output


def test_heal(runner: CliRunner, tmp_path: Path) -> None:
    checkpoint(tmp_path / "base")
    heal = ["heal", "run", str(tmp_path / "base"), "--data", "machine", "-o"]
    heal += [str(tmp_path / "adapter"), "--dense-steps", "1", "--held-out", "1"]
    done = runner.invoke(app, [*heal, "--pattern", "FSSF", "--context", "24", "--rows", "1"])
    assert done.exit_code == 0, done.output
    assert str(Adapter.read(tmp_path / "adapter").pattern) == "FSSF"
    refused = runner.invoke(app, [*heal, "--pattern", "FSS"])
    assert refused.exit_code == 1
    assert refused.output.startswith("indexcache: error: ")


def test_errors_are_one_line(runner: CliRunner, tmp_path: Path) -> None:
    done = runner.invoke(app, ["train", "run", str(tmp_path / "none.yaml"), "-o", str(tmp_path)])
    assert done.exit_code == 1
    assert done.output.startswith("indexcache: error: there is no recipe")
    convert = ["train", "convert", "--model", str(tmp_path), "-o", str(tmp_path / "out")]
    done = runner.invoke(app, convert)
    assert done.exit_code == 1
    assert "is not a checkpoint" in done.output


def test_plan_shows_its_arithmetic(runner: CliRunner) -> None:
    arguments = ["train", "plan", "--model", "glm-5", "--weights", "fp8", "--gpus", "8"]
    done = runner.invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "Arithmetic, not measured: glm-5" in done.output
    assert "mfu 0.3" in done.output
    assert "22 of 78 layers" in done.output
    said = " ".join(done.output.split())
    assert "2 * vocab * hidden" in said
    # What heal does if nothing is given: 320 steps of 4 rows of 4 times index_topk.
    assert "million_tokens 10.4858, length 8192, rows 4" in said
    assert "Heal fits: 122 GB a GPU, 8 GPUs have 141 GB each." in said
    assert "Heal from disk fits on one GPU: 41 GB" in said
    assert "Full training does not fit" in said
    arguments += ["--context", "32Ki"]
    said = " ".join(runner.invoke(app, arguments).output.split())
    assert "million_tokens 41.943, length 32768" in said
    assert "Heal does not fit: 141 GB a GPU. It needs 9 such GPUs" in said
    for option in ("--gpu-memory", "--float32-tflops"):
        zero = runner.invoke(app, [*arguments, option, "0"])
        assert f"{option[2:].replace('-', '_')} is 0.0; it must be above 0" in zero.output
    larger = runner.invoke(app, [*arguments, "--gpu", "b200"])
    assert "Heal fits: 141 GB a GPU, 8 GPUs have 180 GB each." in " ".join(larger.output.split())
    refused = runner.invoke(app, [*arguments, "--mfu", "2"])
    assert refused.exit_code == 1
    assert "mfu is 2.0; it is a share, at most 1" in refused.output
    assert runner.invoke(app, ["train", "plan", "--model", "none"]).exit_code == 1
