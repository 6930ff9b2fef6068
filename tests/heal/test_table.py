"""The Table 3 benchmark on a tiny model: every line is trained and served as it says."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.training_aware import (
    evaluated,
    main,
    mean_and_interval,
    rows,
    scores_of,
    summarise,
    with_mean,
)
from sglang_indexcache.checkpoint import Checkpoint
from sglang_indexcache.heal.trainer import Trainer
from tests.heal.recipes import tiny, tiny_recipe, write


def test_the_whole_table(tmp_path: Path) -> None:
    stages = [{**stage, "steps": 1} for stage in tiny()["stages"]]
    dense = tiny_recipe(pattern="full", stages=stages[:1])
    checkpoint = Trainer(dense, tmp_path / "dense", Console(quiet=True)).run()
    recipe = write(tmp_path / "recipe.yaml", stages=stages[1:])
    arguments = [
        "--checkpoint",
        str(checkpoint),
        "--searched",
        "FFSS",
        "FSSS",
        "--recipe",
        str(recipe),
    ]
    arguments += ["--work", str(tmp_path / "work"), "--seeds", "0", "1", "--length", "48"]
    arguments += ["--rows", "2", "--text-characters", "400000"]
    main([*arguments, "--output", str(tmp_path / "out")])
    found = json.loads((tmp_path / "out.json").read_text())
    assert [line["name"] for line in found["rows"]] == [row.name for row in rows("FFSS", "FSSS")]
    assert all(len(line["seeds"]) == 2 for line in found["rows"])
    assert (tmp_path / "out.png").stat().st_size > 0
    for line in found["rows"]:
        for seed, documents in zip(line["seeds"], found["documents"][line["name"]], strict=True):
            assert {task: len(values) for task, values in documents.items()} == {
                "text": 2,
                "recall": 2,
                "needles": 2,
            }
            assert sum(documents["recall"]) / 2 == pytest.approx(seed["recall"])
    assert found["rows"][0]["over_dsa"]["text_loss"] == {"mean": 0.0, "half_width": 0.0}
    text = (tmp_path / "out.md").read_text()
    assert text.count("\n") == 2 + 9 + 1
    assert text.splitlines()[-1].startswith("| chance | |")
    widths = {line.count("|") for line in text.splitlines()}
    assert len(widths) == 1
    main(["--redraw", "--output", str(tmp_path / "out")])
    assert json.loads((tmp_path / "out.json").read_text()) == found
    assert (tmp_path / "out.md").read_text() == text
    trained = {
        path.name: str(Checkpoint.read(path / "checkpoint").own)
        for path in (tmp_path / "work" / "seed1").iterdir()
    }
    assert trained == {
        "full-multi": "FFFF",
        "uniform-1-2-multi": "FSFS",
        "uniform-1-2-own": "FSFS",
        "FFSS-multi": "FFSS",
        "uniform-1-4-multi": "FSSS",
    }


def test_retrieval_is_the_mean_of_what_was_learned() -> None:
    scores = {"text_loss": 3.0, "recall": 0.9, "needles": 0.5, "tracking": 0.1}
    assert with_mean(scores) == {**scores, "retrieval": pytest.approx(0.7)}
    documents = {"text": [2.0, 4.0], "recall": [0.8, 1.0], "needles": [0.5, 0.5]}
    assert scores_of(documents) == pytest.approx(
        {"text_loss": 3.0, "recall": 0.9, "needles": 0.5, "retrieval": 0.7}
    )


def test_interval_by_hand() -> None:
    found = mean_and_interval([1.0, 2.0, 3.0])
    assert found["mean"] == 2.0
    assert found["half_width"] == pytest.approx(4.30265272991 / 3**0.5)
    assert mean_and_interval([1.0])["half_width"] is None


def test_differences_are_taken_within_a_seed() -> None:
    runs = {"dsa": [{"text_loss": 1.0}, {"text_loss": 2.0}]}
    runs["half"] = [{"text_loss": 1.5}, {"text_loss": 2.5}]
    line = summarise(runs)[1]
    assert line["over_dsa"]["text_loss"] == {"mean": 0.5, "half_width": 0.0}
    assert line["text_loss"]["half_width"] > 0


def test_a_report_is_kept_until_the_question_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def evaluate(*given: object, **options: object) -> dict[str, object]:
        asked.append(given)
        return {"tasks": {}}

    monkeypatch.setattr("benchmarks.training_aware.evaluate_checkpoint", evaluate)
    arguments = Namespace(length=8, rows=2, text_characters=100)
    evaluated(tmp_path, "uniform:1/2", arguments)
    evaluated(tmp_path, "uniform:1/2", arguments)
    assert len(asked) == 1
    evaluated(tmp_path, "uniform:1/2", Namespace(length=8, rows=4, text_characters=100))
    evaluated(tmp_path, "FFSS", arguments)
    assert len(asked) == 3
