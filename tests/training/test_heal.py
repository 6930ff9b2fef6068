"""``heal`` from its files to an adapter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sglang_indexcache.adapter import Adapter
from sglang_indexcache.training.heal import HealOptions, HealResult, heal
from sglang_indexcache.training.run_folder import read_metrics
from tests.cli.test_search import TINY

SMALL: dict[str, Any] = {
    "pattern": "FSSF",
    "data": ("machine",),
    "length": 24,
    "rows": 3,
    "dense_steps": 3,
    "sparse_steps": 2,
    "held_out": 2,
    "evaluate_every": 2,
    "save_every": 1,
    "dtype": "float32",
}


def options(folder: Path, **changes: Any) -> HealOptions:
    """For the checkpoint under ``folder``."""
    return HealOptions(
        **{"checkpoint": folder / "base", "output": folder / "adapter", **SMALL, **changes}
    )


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> tuple[HealResult, Path]:
    """The shipped checkpoint, healed for a few steps."""
    folder = tmp_path_factory.mktemp("learned")
    wanted = HealOptions(
        TINY,
        "uniform:1/2",
        ("machine",),
        folder / "adapter",
        rows=2,
        dense_steps=8,
        evaluate_every=8,
        held_out=4,
        dtype="float32",
    )
    return heal(wanted), folder


def test_the_loss_falls_and_the_recall_rises(learned: tuple[HealResult, Path]) -> None:
    before, after = learned[0].evaluations
    assert after.held_out_loss < 0.9 * before.held_out_loss
    assert after.held_out_recall > before.held_out_recall
    assert (before.total_step, after.total_step) == (0, 8)


def test_what_is_written(learned: tuple[HealResult, Path]) -> None:
    result, folder = learned
    assert Adapter.read(folder / "adapter") == result.adapter
    result.adapter.check(TINY)
    assert {t.dtype for t in result.adapter.tensors().values()} == {torch.bfloat16}
    base = load_file(TINY / "model.safetensors")
    changed = {n for n, t in result.adapter.tensors().items() if not torch.equal(t, base[n])}
    assert {n.split(".")[2] for n in changed} == {"0", "2", "4", "6", "8", "10"}
    run = folder / "adapter.run"
    lines = read_metrics(run)
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 9))
    assert (run / "curves.png").stat().st_size > 10_000


def test_a_finished_run_is_left_as_it_is(learned: tuple[HealResult, Path]) -> None:
    result, folder = learned
    told = json.loads((folder / "adapter.run" / "options.json").read_text())
    again = HealOptions(
        TINY,
        told["pattern"],
        ("machine",),
        folder / "adapter",
        rows=2,
        dense_steps=8,
        evaluate_every=8,
        held_out=4,
        dtype="float32",
    )
    assert heal(again) == result
