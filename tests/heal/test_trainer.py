"""Whole runs: resumed after kill -9, on two processes, and what they write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from sglang_indexcache.checkpoint import Checkpoint
from sglang_indexcache.errors import PatternError, TrainingError
from sglang_indexcache.heal.checkpoints import load
from sglang_indexcache.heal.losses import LossKernel
from sglang_indexcache.heal.model import DistilledModel
from sglang_indexcache.heal.run_folder import RunLog, read_metrics
from sglang_indexcache.heal.scores import evaluate_checkpoint
from sglang_indexcache.heal.sharing import Stage
from sglang_indexcache.heal.trainer import Trainer
from tests.heal.models import logits
from tests.heal.recipes import tiny, tiny_recipe, write
from tests.heal.runs import run, run_until_killed
from tests.oracle import _recorded_margins


def curve(folder: Path) -> list[dict[str, Any]]:
    """The log without what differs between equal runs."""
    return [{k: v for k, v in line.items() if k != "seconds"} for line in read_metrics(folder)]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoint" / "model.safetensors")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run from start to end in one process."""
    folder = tmp_path_factory.mktemp("finished")
    run(write(folder / "recipe.yaml"), folder / "run")
    return folder / "run"


def test_every_stage_is_logged(finished: Path) -> None:
    lines = [line for line in curve(finished) if "index" in line]
    assert [line["total_step"] for line in lines] == list(range(1, 13))
    for line in lines:
        assert (line["index"] > 0) == (line["kind"] != "dense")
        assert (line["indexer_norm"] > 0) == (line["kind"] != "dense")
        assert (line["body_norm"] > 0) == (line["kind"] != "warmup")
        assert ("lm" in line) == (line["kind"] != "warmup")
        assert len(line["index_by_layer"]) == 4
        assert sum(line["index_by_layer"]) == pytest.approx(line["index"])
    evaluations = [line for line in curve(finished) if "held_out_text" in line]
    assert [line["total_step"] for line in evaluations] == [4, 8, 12]


def test_warm_up_moves_indexers_only(tmp_path: Path) -> None:
    stage = tiny()["stages"][1]
    trainer = Trainer(tiny_recipe(stages=[stage]), tmp_path, Console(quiet=True))
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    trainer.run()
    moved = {n for n, p in trainer.model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {n for n in before if ".indexer." in n}


@pytest.mark.parametrize("killed_at", [3, 7, 11])
def test_a_killed_run_goes_on_as_if_nothing_had_happened(
    finished: Path, tmp_path: Path, killed_at: int
) -> None:
    recipe, folder = write(tmp_path / "recipe.yaml"), tmp_path / "run"
    run_until_killed(recipe, folder, killed_at)
    assert not (folder / "checkpoint").exists()
    assert "resumed after step" in run(recipe, folder)
    assert curve(folder) == curve(finished)
    for name, tensor in weights(finished).items():
        assert torch.equal(tensor, weights(folder)[name]), name


def test_a_line_of_the_log_is_the_mean_since_the_last_line_or_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a run which goes on from a state writes what it would have written."""
    stage = {**tiny()["stages"][0], "steps": 12}

    def lines(name: str, **changes: Any) -> list[dict[str, Any]]:
        recipe = tiny_recipe(stages=[stage], eval_rows=1, **changes)
        Trainer(recipe, tmp_path / name, Console(quiet=True)).run()
        return [line for line in curve(tmp_path / name) if "lm" in line]

    every = {line["step"]: line for line in lines("every", log_every=1, save_every=4)}
    some = lines("some", log_every=3, save_every=4)
    since = {3: (1, 2, 3), 6: (5, 6), 9: (9,), 12: (10, 11, 12)}
    assert [line["step"] for line in some] == list(since)
    for line in some:
        own = [every[step]["body_norm"] for step in since[line["step"]]]
        assert line["body_norm"] == pytest.approx(sum(own) / len(own))
        losses = [every[step]["lm"] for step in since[line["step"]]]
        assert min(losses) - 1e-6 <= line["lm"] <= max(losses) + 1e-6

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_evaluate", die)  # after the last step's line, before its state
        with pytest.raises(KeyboardInterrupt):
            lines("again", log_every=3, save_every=4)
    assert lines("again", log_every=3, save_every=4) == some


def test_two_processes_equal_one(finished: Path, tmp_path: Path) -> None:
    run(write(tmp_path / "recipe.yaml"), tmp_path / "two", processes=2)
    for one, two in zip(curve(finished), curve(tmp_path / "two"), strict=True):
        assert one.pop("kind") == two.pop("kind")
        layers = one.pop("index_by_layer", []), two.pop("index_by_layer", [])
        assert layers[0] == pytest.approx(layers[1], rel=1e-3, abs=1e-5)
        assert one == pytest.approx(two, rel=1e-3, abs=1e-5)
    for name, tensor in weights(finished).items():
        torch.testing.assert_close(tensor, weights(tmp_path / "two")[name], rtol=1e-3, atol=1e-4)


def test_the_checkpoint_is_standard(finished: Path) -> None:
    """Plain transformers loads it without a missing or an unexpected weight and agrees with us."""
    checkpoint = finished / "checkpoint"
    config = json.loads((checkpoint / "config.json").read_text())
    assert config["indexer_types"] == ["full", "shared", "full", "shared"]
    assert {"moe_layer_freq", "scoring_func", "topk_method", "num_experts"} <= config.keys()
    owners = {n.split(".")[2] for n in weights(finished) if ".indexer." in n}
    assert owners == {"0", "2"}
    plain, report = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    model, tokenizer = load(checkpoint)
    ids = torch.randint(0, len(tokenizer), (1, 40))
    ours = DistilledModel(model, Checkpoint.read(checkpoint).own)
    got = logits(ours, ids, Stage.SPARSE)
    with torch.no_grad(), _recorded_margins(plain.config.index_topk, [], first_of_ties=True):
        torch.testing.assert_close(got, plain(ids).logits, rtol=1e-4, atol=1e-4)


def test_a_checkpoint_can_be_trained_further_with_fewer_indexers(
    finished: Path, tmp_path: Path
) -> None:
    stage = tiny()["stages"][2]
    recipe = tiny_recipe(
        model={"checkpoint": finished / "checkpoint"}, pattern="FSSS", stages=[stage]
    )
    checkpoint = Trainer(recipe, tmp_path, Console(quiet=True)).run()
    found = evaluate_checkpoint(checkpoint, length=48, rows=2, text_characters=400_000)
    assert found["pattern"] == "FSSS"
    assert set(found["tasks"]) == {"text", "recall", "needles", "tracking"}
    assert found["tasks"]["text"]["loss"] > 0


def test_full_keeps_the_sharing_that_a_checkpoint_has(finished: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(model={"checkpoint": finished / "checkpoint"}, pattern="full")
    trainer = Trainer(recipe, tmp_path, Console(quiet=True))
    assert str(trainer.model.pattern) == "FSFS"


def test_a_deepseek_checkpoint_has_no_indexers_on_shared_layers(tmp_path: Path) -> None:
    model = {**tiny()["model"], "preset": "deepseek-v3.2"}
    model["fields"] = {**model["fields"], "n_group": 1, "topk_group": 1}
    stages = [{**stage, "steps": 1} for stage in tiny()["stages"]]
    recipe = tiny_recipe(model=model, stages=stages, dtype="bfloat16", gradient_checkpointing=True)
    checkpoint = Trainer(recipe, tmp_path, Console(quiet=True)).run()
    stored = load_file(checkpoint / "model.safetensors")
    assert {n.split(".")[2] for n in stored if ".indexer." in n} == {"0", "2"}
    assert {t.dtype for n, t in stored.items() if "proj" in n} == {torch.bfloat16}
    assert str(Checkpoint.read(checkpoint).own) == "FSFS"


def test_tensorboard_events_are_written(tmp_path: Path) -> None:
    stages = [{**tiny()["stages"][0], "steps": 1}]
    Trainer(tiny_recipe(stages=stages, tensorboard=True), tmp_path, Console(quiet=True)).run()
    assert list((tmp_path / "tensorboard").glob("events*"))


def test_half_a_log_line_does_not_stop_a_resume(tmp_path: Path) -> None:
    log = RunLog(tmp_path, True, Console(quiet=True), tensorboard=False)
    for step in (1, 2, 3):
        log.write(stage=0, step=step, total_step=step)
    with log.path.open("a") as file:
        file.write('{"stage": 0, "st')
    log.rewind(0, 2)
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]


def test_a_users_files_are_trained_on(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    rows = [{"prompt": f"what is {i}? " * 3, "response": f"it is {i}"} for i in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {**tiny()["data"], "mixture": {"files": 1.0}, "files": [str(path)]}
    stages = [{**stage, "steps": 1} for stage in tiny()["stages"]]
    Trainer(tiny_recipe(data=data, stages=stages), tmp_path / "run", Console(quiet=True)).run()
    lines = read_metrics(tmp_path / "run")
    assert sum("held_out_files" in line for line in lines) == len(stages)
    assert all(line["lm"] > 0 for line in lines if "lm" in line)


def test_data_that_cannot_fit_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    stages = [{**tiny()["stages"][0], "length": 16}]
    with pytest.raises(TrainingError, match=r"stages.0 has rows of 16 tokens"):
        Trainer(tiny_recipe(stages=stages), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_pattern_that_cannot_fit_is_refused_before_anything_is_built(
    finished: Path, tmp_path: Path
) -> None:
    with pytest.raises(PatternError, match="too short"):
        Trainer(tiny_recipe(pattern="FSF"), tmp_path / "run")
    model = {"checkpoint": finished / "checkpoint"}
    with pytest.raises(PatternError, match="layers 1, 3 are F"):
        Trainer(tiny_recipe(model=model, pattern="FFFF"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_kernel_of_the_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny_recipe(loss_kernel="triton")
    if not torch.cuda.is_available():
        with pytest.raises(TrainingError, match="needs a GPU, and there is none here"):
            Trainer(recipe, tmp_path)
        assert not list(tmp_path.iterdir())
    monkeypatch.setattr(LossKernel, "check", lambda *_: None)
    assert Trainer(recipe, tmp_path).model.sharing.kernel is LossKernel.TRITON
