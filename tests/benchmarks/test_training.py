"""The trainer behind Table 3 in small, on a model that trains in a second."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from rich.console import Console
from torch.nn.functional import cross_entropy

from benchmarks.paper import table_3
from benchmarks.training.batches import IGNORED, Mixture
from benchmarks.training.model import next_token_losses
from benchmarks.training.recipe import RECIPES, Recipe, load_recipe
from benchmarks.training.retrieval import MachineText, TaskWords
from benchmarks.training.scores import unigram_loss
from benchmarks.training.trainer import Trainer
from sglang_indexcache.checkpoint import Checkpoint
from sglang_indexcache.errors import TrainingError
from sglang_indexcache.lab.heal.run_folder import read_metrics
from tests.lab.heal.models import FIELDS
from tests.lab.heal.tokenizers import tokenizer


def tiny(**changes: Any) -> dict[str, Any]:
    """Return all three stages, 4 layers, half of them F."""
    fields = {k: v for k, v in FIELDS.items() if k not in ("vocab_size", "num_key_value_heads")}
    stage = {"rows": 4, "length": 48, "warmup_steps": 2, "steps": 2}
    mixture = {"text": 1.0, "recall": 1.0, "needles": 1.0, "tracking": 1.0}
    recipe = {
        "model": {"fields": fields, "vocab_size": 700},
        "pattern": "uniform:1/2",
        "data": {"text_characters": 400_000, "mixture": mixture, "lengths": [24, 48]},
        "stages": [
            {"kind": "dense", "optimizer": "muon", **stage},
            {"kind": "warmup", **stage},
            {"kind": "sparse", "optimizer": "muon", **stage},
        ],
        "log_every": 1,
        "save_every": 1,
        "eval_rows": 2,
        "dtype": "float32",
    }
    return recipe | changes


def train(folder: Path, **changes: Any) -> Trainer:
    trainer = Trainer(Recipe.model_validate(tiny(**changes)), folder, Console(quiet=True))
    trainer.run()
    return trainer


def curve(folder: Path) -> list[dict[str, Any]]:
    """Return the log without what differs between equal runs."""
    return [{k: v for k, v in line.items() if k != "seconds"} for line in read_metrics(folder)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    train(folder)
    return folder


def test_every_stage_is_logged_and_trains_what_it_says(finished: Path) -> None:
    lines = [line for line in curve(finished) if "index" in line]
    assert [line["total_step"] for line in lines] == list(range(1, 7))
    for line in lines:
        assert (line["index"] > 0) == (line["kind"] != "dense")
        assert (line["indexer_norm"] > 0) == (line["kind"] != "dense")
        assert (line["body_norm"] > 0) == ("lm" in line) == (line["kind"] != "warmup")
        assert sum(line["index_by_layer"]) == pytest.approx(line["index"])
    assert str(Checkpoint.read(finished / "checkpoint").own) == "FSFS"


@pytest.mark.parametrize("stopped_after", [1, 3, 5])
def test_a_stopped_run_goes_on_as_if_nothing_had_happened(
    finished: Path, tmp_path: Path, stopped_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, steps = Trainer._step, []

    def stop(*arguments: Any) -> None:
        if len(steps) == stopped_after:
            raise KeyboardInterrupt
        steps.append(arguments)
        step(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", stop)
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path)
    train(tmp_path)
    assert curve(tmp_path) == curve(finished)
    file = "checkpoint/model.safetensors"
    assert (tmp_path / file).read_bytes() == (finished / file).read_bytes()


def test_table_3_trains_and_serves_every_line_as_it_says(finished: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    stages = [{**stage, "steps": 1} for stage in tiny()["stages"][1:]]
    recipe.write_text(yaml.safe_dump(tiny(stages=stages)))
    train(tmp_path / "dense", pattern="full", stages=tiny()["stages"][:1])
    options = ["--checkpoint", str(tmp_path / "dense" / "checkpoint"), "--searched", "FFSS", "FSSS"]
    options += ["--recipe", str(recipe), "--work", str(tmp_path / "work"), "--seeds", "0", "1"]
    options += ["--length", "48", "--rows", "2", "--text-characters", "400000"]
    table_3.main([*options, "--output", str(tmp_path / "out")])
    record = json.loads((tmp_path / "out.json").read_text())
    rows = table_3.rows("FFSS", "FSSS")
    assert [line["name"] for line in record["rows"]] == [row.name for row in rows]
    assert record["rows"][0]["over_dsa"]["text_loss"] == {"mean": 0.0, "half_width": 0.0}
    assert (tmp_path / "out.md").read_text().count("\n") == 2 + 9 + 1
    folders = (tmp_path / "work" / "seed1").iterdir()
    trained = {
        path.name.rpartition("-")[0]: str(Checkpoint.read(path / "checkpoint").own)
        for path in folders
    }
    assert trained == {
        "full-multi": "FFFF",
        "uniform-1-2-multi": "FSFS",
        "uniform-1-2-own": "FSFS",
        "FFSS-multi": "FFSS",
        "uniform-1-4-multi": "FSSS",
    }


@pytest.mark.parametrize("name", sorted(path.stem for path in RECIPES.glob("*.yaml")))
def test_recipes_are_valid(name: str) -> None:
    recipe = load_recipe(name)
    layers = recipe.model.fields.get("num_hidden_layers")
    assert layers is None or len(recipe.resolved_pattern()) == layers


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_the_lm_loss_in_chunks_equals_the_whole(chunk: int) -> None:
    states = torch.randn(2, 23, 8, dtype=torch.float64, requires_grad=True)
    head = torch.nn.Linear(8, 31, bias=False, dtype=torch.float64)
    targets = torch.randint(0, 31, (2, 23))
    targets[0, 5:9] = targets[1, -1] = IGNORED
    nats, hits = next_token_losses(states, head, targets, chunk)
    logits = head(states)
    want = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    torch.testing.assert_close(nats.flatten(), want)
    assert torch.equal(hits, logits.argmax(-1) == targets)
    mine = torch.autograd.grad(nats.sum(), [states, head.weight])
    for gradient, expected in zip(
        mine, torch.autograd.grad(want.sum(), [states, head.weight]), strict=True
    ):
        torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sede": 1}, "sede"),
        ({"model": {"preset": "gpt"}}, "glm-5"),
        ({"data": {**tiny()["data"], "lengths": [64]}}, "stages.0 has rows of 48 tokens"),
    ],
)
def test_a_wrong_recipe_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(tiny(**change)))
    with pytest.raises(TrainingError, match=message):
        load_recipe(tmp_path / "r.yaml")


def test_rows_are_a_function_of_seed_step_and_number() -> None:
    words, text = TaskWords(tokenizer()), MachineText.read(tokenizer(), 500_000)
    weights = {"text": 1.0, "recall": 1.0, "needles": 1.0}

    def batch(step: int, rows: list[int], seed: int = 0) -> Any:
        return Mixture(tokenizer(), text, words, weights, [32, 48], seed).batch(step, rows, 100)

    full, part = batch(3, list(range(16))), batch(3, [1, 4])
    for name, tensor in vars(full).items():
        assert torch.equal(tensor[[1, 4]], getattr(part, name))
    assert not torch.equal(full.ids, batch(4, list(range(16))).ids)
    assert not torch.equal(full.ids, batch(3, list(range(16)), seed=1).ids)
    labelled = full.labels != IGNORED
    assert torch.equal(full.labels[labelled], full.ids[labelled])
    assert (labelled | ~full.answers).all()
    assert full.answers.any()
    assert not labelled[full.documents == -1].any()
    assert not labelled[full.positions == 0].any()


def test_unigram_loss_of_equal_frequencies_is_the_entropy() -> None:
    tokens = np.repeat(np.arange(8, dtype=np.int32), 1000)
    assert unigram_loss(tokens, tokens, 8) == pytest.approx(math.log(8))
