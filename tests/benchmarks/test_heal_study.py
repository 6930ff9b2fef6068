"""The study of healing: what it runs, resumes and makes of its reports."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import heal_study
from benchmarks.heal_study import (
    ALL_F,
    FREE,
    HEALED,
    TRAINED,
    Run,
    all_runs,
    cost_of_a_step,
    main,
    parse,
    summarise,
    table,
    train_indexers,
    trained_recipe,
)
from sglang_indexcache.stats.bounds import half_width


def report(run: Run, values: Sequence[float], seconds: float | None = None) -> dict[str, Any]:
    documents = {name: list(values) for name in heal_study.METRICS}
    scored = {"rows": 2, "length": 512, "text_characters": 4_000_000}
    return {"run": run.told, "scored": scored, "cpu_seconds": seconds, "documents": documents}


BASE = report(Run(ALL_F, FREE), [1.0, 2.0])


def test_the_trained_recipe_has_both_stages_and_all_steps() -> None:
    recipe = trained_recipe(Run("1/4 uniform", TRAINED, 5, 7), 1000)
    assert [(stage.kind, stage.steps) for stage in recipe.stages] == [("warmup", 2), ("sparse", 3)]
    assert (recipe.seed, recipe.pattern) == (7, "uniform:1/4")


def test_healing_is_asked_for_as_the_run_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def heal(options: Any) -> Any:
        asked.append(options)
        return SimpleNamespace(adapter="adapter")

    monkeypatch.setattr(heal_study, "heal", heal)
    arguments = parse(["--work", str(tmp_path), "--heal-steps", "8", "--text-characters", "400000"])
    run = Run("1/2 uniform", HEALED, 8, 3, dense=0.75, lr=0.1)
    served = train_indexers(run, tmp_path / "run", arguments)
    assert (served.pattern, served.adapter) == ("uniform:1/2", "adapter")
    (options,) = asked
    assert (options.dense_steps, options.sparse_steps, options.lr, options.seed) == (6, 2, 0.1, 3)
    lines = Path(options.data[0]).read_text().splitlines()
    assert len(lines) >= 16
    assert all(json.loads(line)["text"] for line in lines)


def test_differences_by_hand() -> None:
    runs = [report(Run("1/2 uniform", HEALED, 8, seed), [1.5, 2.5 + seed]) for seed in (0, 1)]
    base, line = summarise([BASE, *runs])
    assert base["text_loss"] == {"over_all_f": 0.0, "half_width": 0.0}
    assert line["seeds"] == [0, 1]
    assert line["recall"]["over_all_f"] == pytest.approx((0.5 + 0.5 + 0.5 + 1.5) / 4)
    (free,) = summarise([BASE, report(Run("1/2 uniform", FREE), [1.5, 3.0])])[1:]
    assert free["recall"]["half_width"] == pytest.approx(half_width([0.5, 1.0]))


def test_cost_is_a_ratio_of_the_longest_runs() -> None:
    runs = [
        report(Run("1/2 uniform", HEALED, 2, 0), [1, 2], 100.0),
        report(Run("1/2 uniform", HEALED, 10, 0), [1, 2], 20.0),
        report(Run("1/2 uniform", TRAINED, 5, 0), [1, 2], 30.0),
        report(Run("1/2 uniform", TRAINED, 5, 1), [1, 2], None),
    ]
    assert cost_of_a_step(summarise([BASE, *runs])) == {HEALED: 1.0, TRAINED: 3.0}
    assert cost_of_a_step(summarise([BASE, runs[2]])) == {}


def work_with(folder: Path, reports: Sequence[dict[str, Any]]) -> list[str]:
    for one in reports:
        run = Run(**one["run"])
        (folder / run.folder).mkdir(parents=True)
        (folder / run.folder / "report.json").write_text(json.dumps(one))
    where = ["--work", str(folder), "--output", str(folder / "out"), "--rows", "2"]
    return [*where, "--redraw", "--seeds", "0", "--heal-steps", "8", "--trained-steps", "4"]


def test_what_is_there_is_told_and_the_rest_is_not_measured(tmp_path: Path) -> None:
    healed = report(Run("1/4 uniform", HEALED, 8, 0), [1.5, 2.0], 8.0)
    trained = report(Run("1/4 uniform", TRAINED, 4, 0), [1.25, 2.0], 8.0)
    main(work_with(tmp_path, [BASE, healed, trained]))
    found = json.loads((tmp_path / "out.json").read_text())
    assert len(found["lines"]) == 3
    assert len(found["not_measured"]) == len(all_runs([0], [8], 4)) - 3
    assert found["step_time_over_heal"] == {HEALED: 1.0, TRAINED: 2.0}
    assert found["reports"][1]["documents"]["recall"] == [1.5, 2.0]
    assert (tmp_path / "out.png").stat().st_size > 0
    text = table(found["lines"])
    assert "| 1/4 uniform | healed | 8 | 1 | +0.250" in text
    assert len({line.count("|") for line in text.splitlines()}) == 1


def test_reports_of_other_documents_are_refused(tmp_path: Path) -> None:
    arguments = work_with(tmp_path, [BASE])
    with pytest.raises(SystemExit, match="Give the same options, or another --work"):
        main([*arguments, "--length", "256"])
    with pytest.raises(SystemExit, match="--only training-free makes it"):
        main([*arguments[:1], str(tmp_path / "none"), *arguments[2:]])
