"""The study of healing's data: what it heals on, and what it makes of its reports."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import heal_data, heal_study
from benchmarks.heal_data import ALL_F, FEW, LENGTH, PATTERN, SOURCE, TASK, Run
from sglang_indexcache.heal import STEPS
from sglang_indexcache.heal.heal import HealOptions


def test_every_run_has_a_folder_of_its_own() -> None:
    cells = heal_data.all_cells([0, 1, 2])
    assert len(cells) == len(set(cells))
    runs = {run for run, _ in cells}
    assert len({run.folder for run in runs}) == len(runs)


def test_conversations_ask_for_what_is_documented() -> None:
    source = (
        'def bare(): pass\ndef told():\n    """Says\n    it."""\nclass Thing:\n    """One."""\n'
    )
    (talk,) = heal_data._conversations(source)
    assert [message["content"] for message in talk["messages"]] == [
        "What does told do?",
        "Says\nit.",
        "What does Thing do?",
        "One.",
    ]


def test_differences_are_taken_document_by_document(tmp_path: Path) -> None:
    healed = Run(PATTERN, SOURCE, LENGTH, FEW, 0)
    tasks = [(Run(PATTERN, TASK, LENGTH, FEW, seed), [1.0, 0.7]) for seed in (0, 1)]
    free = [(Run(ALL_F), [1.0, 0.8]), (Run(PATTERN), [0.5, 0.3])]
    for run, recall in (*free, (healed, [0.9, 0.5]), *tasks):
        (tmp_path / run.folder).mkdir()
        (tmp_path / run.folder / f"asked-{LENGTH}.json").write_text(json.dumps(recall))
    lines, missing = heal_data.collect([0, 1], tmp_path)
    assert f"{healed.folder} asked at 256" in missing
    found = {(line["pattern"], line["healed_on"]): line for line in lines}
    assert found[PATTERN, None]["over_all_f"] == pytest.approx(-50)
    assert found[PATTERN, None]["half_width"] == pytest.approx(0, abs=1e-9)
    assert found[PATTERN, SOURCE]["over_all_f"] == pytest.approx(-20)
    assert found[PATTERN, TASK]["over_all_f"] == pytest.approx(-5)
    assert found[PATTERN, TASK]["seeds"] == 2
    text = heal_data.table(lines)
    assert "| all F, as it is | 90.0 % |  |" in text
    assert "| uniform 1/4, 80 steps on source at 512 | -20.0 ± " in text


def test_a_mixture_reads_as_many_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[HealOptions] = []

    def noted(options: HealOptions) -> SimpleNamespace:
        asked.append(options)
        return SimpleNamespace(adapter=None)

    monkeypatch.setattr(heal_data, "data_of", lambda *_: tmp_path / "data")
    monkeypatch.setattr(heal_study, "heal", noted)
    runs = {run for run, _ in heal_data.all_cells([0]) if run.healed_on and run.steps == STEPS}
    for run in runs:
        heal_data.adapter_of(run, tmp_path)
    for one in asked:
        assert one.length is not None
        sparse = one.sparse_steps * (one.sparse_length or one.length)
        assert one.rows * (one.dense_steps * one.length + sparse) == STEPS * LENGTH
    assert {one.sparse_length for one in asked} == {None, LENGTH, 2048}
