"""The report on a trained checkpoint: every cell is there, starved ones differ, plots are drawn."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from benchmarks.small_checkpoint import main, table
from sglang_indexcache.heal.trainer import Trainer
from tests.heal.recipes import tiny, tiny_recipe


def test_report_of_a_run(tmp_path: Path) -> None:
    stages = [{**stage, "steps": 2} for stage in tiny()["stages"]]
    Trainer(tiny_recipe(stages=stages), tmp_path / "run", Console(quiet=True)).run()
    arguments = [str(tmp_path / "run"), "--lengths", "48", "--topks", "8", "2", "--rows", "2"]
    main([*arguments, "--output", str(tmp_path / "out")])
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert [cell["topk"] for cell in result["cells"]] == ["dense", 8, 2]
    dense, _, starved = (cell["text_loss"] for cell in result["cells"])
    assert dense != starved
    assert {entry["kind"] for entry in result["training"]} == {s["kind"] for s in stages}
    for plot in ("curves.png", "starved.png"):
        assert (tmp_path / "out" / plot).stat().st_size > 0


def test_table_of_a_single_document() -> None:
    score = {"accuracy": 0.5, "half_width": None}
    cell = {"length": 48, "topk": 8, "text_loss": 1.25, "recall": score}
    line = table([cell | {"needles": score, "tracking": {"accuracy": 1.0, "half_width": 0.25}}])
    *_, scored, guessed = line.splitlines()
    assert scored == "| 48 | 8 | 1.250 | 50.0 % | 50.0 % | 100.0 % ± 25.0 |"
    assert guessed == "| 48 | chance | | 11.2 % | 100.0 % | 100.0 % |"
