"""The driver of Table 1 on real servers: on the CPU platform, and on SGLang's own CUDA path.

Numbers of a CPU mean nothing: what counts is that every step goes through and what it leaves.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.card import phases, slices, table_1
from benchmarks.card.shapes import CARD, REHEARSAL
from benchmarks.card.table_1 import ARMS, GATE, Run
from tests.fixtures import stage
from tests.fixtures.held import PreloadedHeldServer

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.matrix,
    pytest.mark.skipif(torch.accelerator.is_available(), reason="these serve without a GPU"),
]
LIKE_THE_CARD = ("--kv-cache-dtype", "--dsa-prefill-backend", "--dsa-decode-backend")


def test_a_gate_an_arm_and_a_full_cache_leave_their_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_1, "HeldServer", PreloadedHeldServer)
    arms = tuple(arm for arm in ARMS if arm.name in ("ours, 1/4", "full cache, 1/4"))
    monkeypatch.setattr(table_1, "ARMS", arms)
    report = phases.Report(tmp_path / "out")
    run = Run(report, REHEARSAL, tmp_path, time.monotonic() + 900, ())
    assert run.gate()
    run.table()
    steps: dict[str, Any] = json.loads(report.path.read_text())["steps"]
    codes = {name: steps[name]["code"] for name in (GATE, *(arm.name for arm in arms))}
    assert set(codes.values()) == {0}, report.summary()
    seen = steps[GATE]["evidence"]["seen"]
    assert seen["distinct index keys"] == 1
    assert seen["experts used"] == REHEARSAL.model["n_routed_experts"]
    single, full = (steps[arm.name]["evidence"] for arm in arms)
    assert single["pattern"] == full["pattern"] == "FSSS"
    lengths = [sample["length"] for sample in single["samples"]]
    assert lengths == [*[REHEARSAL.lengths[0]] * table_1.SHORTEST, *REHEARSAL.lengths[1:]]
    assert all(sample["prefill"] > 0 < sample["decode"] for sample in single["samples"])
    assert [sample["requests"] for sample in full["samples"]] == [4, 6]
    assert all(sample["full"] > 0 for sample in full["samples"])
    again = Run(phases.Report(tmp_path / "out"), REHEARSAL, tmp_path, time.monotonic() + 900, ())
    assert again.gate()  # nothing starts: what has passed is not repeated
    again.table()


def test_stock_and_ours_go_through_with_20_heads_in_fp8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in stage.variables(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(table_1, "HeldServer", PreloadedHeldServer)
    monkeypatch.setattr(table_1, "SHORTEST", 1)
    arms = tuple(arm for arm in ARMS if arm.name in ("stock, all F", "full cache, 1/4"))
    monkeypatch.setattr(table_1, "ARMS", arms)
    kernels = [part for flag in LIKE_THE_CARD for part in (flag, _value_of(flag))]
    fp8 = {"quantization_config": CARD.model["quantization_config"]}
    scale = replace(
        REHEARSAL,
        model={**REHEARSAL.model, **fp8},
        patterns={**REHEARSAL.patterns, "": ""},
        lengths=(160,),  # the stage is slow: 20 heads are computed as 64, in float64
        watched=160,
        full_pool=704,
        new_tokens=3,
        flags=(*REHEARSAL.flags, *kernels, "--disable-prefill-cuda-graph"),
        products=((),),  # the stage knows DeepGEMM's by reference; it would interpret Triton's
        start_seconds=400,
    )
    report = phases.Report(tmp_path / "out")
    run = Run(report, scale, tmp_path, time.monotonic() + 3000, ("--mem-fraction-static", "0.5"))
    assert run.gate(), report.log.read_text()[-3000:]
    run.table()
    steps: dict[str, Any] = json.loads(report.path.read_text())["steps"]
    names = (GATE, *(arm.name for arm in arms))
    assert {name: steps[name]["code"] for name in names} == dict.fromkeys(names, 0), steps
    stock, full = (steps[arm.name]["evidence"] for arm in arms)
    assert stock["seen"]["indexer seconds"] > 0
    assert stock["seen"]["distinct index keys"] > 0.99
    assert [sample["requests"] for sample in full["samples"]] == [2]


def _value_of(flag: str) -> str:
    return CARD.flags[CARD.flags.index(flag) + 1]


def test_slices_side_by_side_tell_what_a_layer_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slices, "HeldServer", PreloadedHeldServer)
    monkeypatch.setattr(slices, "ROUNDS", 1)
    report = phases.Report(tmp_path / "out")
    scale = replace(REHEARSAL, lengths=(160,))
    slices.measure(Run(report, scale, tmp_path, time.monotonic() + 3000, ()))
    steps: dict[str, Any] = json.loads(report.path.read_text())["steps"]
    assert {name: step["code"] for name, step in steps.items()} == dict.fromkeys(slices.SLICES, 0)
    for step in steps.values():
        patterns = [sample["pattern"] for sample in step["evidence"]["samples"]]
        assert patterns == slices.patterns_of(4) == ["FFFF", "FSFS", "FSSS", "FS"]
        costs = step["evidence"]["costs"]["160"]
        assert sorted(costs) == ["F", "S", "constant", "residual"]


@pytest.mark.matrix
def test_of_what_has_waited_the_start_goes_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Live mode's 54 answers are too many for the stage, and times are a card's."""
    for name, value in stage.variables(tmp_path).items():
        monkeypatch.setenv(name, value)
    report = phases.Report(tmp_path / "out")
    steps = [replace(step, seconds=900) for step in (phases.engine_kernels()[0], phases.START)]
    phases.run_stage(
        [replace(step, needs=()) for step in steps], report, tmp_path, time.monotonic() + 900
    )
    results = json.loads(report.path.read_text())["steps"]
    assert {name: step["code"] for name, step in results.items()} == {
        step.name: 0 for step in steps
    }, report.summary()


def test_one_folder_holds_one_card_and_one_scale(tmp_path: Path) -> None:
    table_1.check_same(phases.Report(tmp_path), rehearse=True, flags=[])
    report_again = phases.Report(tmp_path)
    report_again.content["asked"] = {"rehearse": True, "flags": [], "name": "H100", "commit": "a"}
    with pytest.raises(SystemExit, match="another commit, name, rehearse, and one table"):
        table_1.check_same(report_again, rehearse=False, flags=[])
