"""The driver of Table 1 on the CPU platform: a gate, an arm, a full KV cache, in its own report.

Numbers of a CPU mean nothing: what counts is that every step goes through and what it leaves.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.card import phases, table_1
from benchmarks.card.shapes import REHEARSAL
from benchmarks.card.table_1 import ARMS, GATE, Run
from tests.fixtures.held import PreloadedHeldServer


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
