"""Planned bytes beside those that a run holds, and what a dry run advises."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_indexcache.errors import TrainingError
from sglang_indexcache.lab.heal.frozen import FrozenBody
from sglang_indexcache.lab.heal.heal import HealOptions
from sglang_indexcache.lab.heal.local import LocalSharing, Passing
from sglang_indexcache.lab.heal.packing import Layout
from sglang_indexcache.lab.heal.plan import (
    GpuMachine,
    HealPlan,
    counted_gpus,
    dry_run,
    plan_of,
)
from sglang_indexcache.lab.heal.sharing import Stage
from sglang_indexcache.pattern import Pattern
from tests.lab.heal import models
from tests.lab.heal.checkpoints import checkpoint, quantise
from tests.lab.heal.models import LAYERS, tokens
from tests.lab.heal.test_frozen import Memory

LENGTH = 40
MACHINE = GpuMachine(2, "a GPU", memory=1e9, bf16=1e12, float32=1e11, bandwidth=1e12)


def options(folder: Path, **changes: object) -> HealOptions:
    required = {"checkpoint": folder, "pattern": "FSFS", "data": (), "output": folder / "out"}
    return HealOptions(**{**required, "length": LENGTH, "dense_steps": 2, **changes})  # type: ignore[arg-type]


FULLEST_AT: dict[str, dict[str, Any]] = {
    # Keys and values of one width: torch's fused attention takes them on a CPU.
    "attention": {
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "qk_nope_head_dim": 24,
        "v_head_dim": 32,
    },
    "losses": {"index_n_heads": 16},
    "dense MLP": {"intermediate_size": 512, "first_k_dense_replace": LAYERS},
    "sum of experts": {"hidden_size": 64, "num_experts_per_tok": 4},
    "each expert": {"moe_intermediate_size": 256},
}
"""Dimensions by which a layer's fullest moment is this one."""


@pytest.mark.parametrize("moment", FULLEST_AT)
@pytest.mark.parametrize("stage", [Stage.WARMUP, Stage.SPARSE])
def test_the_peak_of_the_fullest_device_is_as_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, stage: Stage
) -> None:
    """Every tensor that a step makes is counted, and what is resident is what loading added."""
    fields = {**models.FIELDS, "index_topk": 64, **FULLEST_AT[moment]}
    monkeypatch.setattr(models, "FIELDS", fields)
    checkpoint(tmp_path, dtype=torch.bfloat16)
    dense, length, devices = int(stage is Stage.WARMUP), 384, 2
    if dense:
        quantise(tmp_path)
    steps = {"dense_steps": dense, "sparse_steps": 1 - dense, "lr": 1e-3}
    settings = options(tmp_path, pattern="FSSS", length=length, block=16, **steps)
    planned = plan_of(settings, replace(MACHINE, gpus=devices))

    ids, positions = tokens(1, length), torch.arange(length)[None]
    with Memory() as memory:
        sharing = LocalSharing(Pattern("FSSS"), 64, block=16)
        cpus = [torch.device("cpu")] * devices
        body = FrozenBody(tmp_path, Pattern("FSSS"), sharing, torch.bfloat16, cpus)
        resident = []
        for number in range(LAYERS):
            before = memory._alive
            body.layer(number)
            resident.append(memory._alive - before)
        passing = Passing(
            sharing.begin(stage, Layout(torch.zeros_like(ids)), length),
            *body.start(ids, positions),
        )
        start, measured = memory._alive, []
        for share in body.shares:
            memory.peak = memory._alive
            for number in share:
                passing.through(body.layer(number), body.devices[number], sharing)
            trained = [body.indexers[n] for n in share if n in body.indexers]
            state = sum(4 * p.nbytes for indexer in trained for p in indexer.parameters())
            embedding = body._embedding.nbytes if 0 in share else 0
            measured.append(
                sum(resident[n] for n in share) + state + embedding + memory.peak - start
            )
    assert [share.layers for share in planned.shares] == body.shares
    assert planned.peak == pytest.approx(max(measured), rel=0.1)


def test_a_dry_run_needs_no_weights_and_says_what_helps(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    planned = dict(dry_run(options(tmp_path), MACHINE))
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    assert dict(dry_run(options(tmp_path), MACHINE))["GPU 0"] == planned["GPU 0"]
    idle = r"it fits, with \d+% of the memory to spare; with --rows 2 the GPUs would work at once"
    assert re.fullmatch(idle, planned["verdict"])
    busy = dict(dry_run(options(tmp_path, rows=2), MACHINE))["verdict"]
    assert re.fullmatch(r"it fits, with \d+% of the memory to spare", busy)
    assert "2 GPUs at work" in planned["hours"]
    small = GpuMachine(2, "a GPU", memory=1e4, bf16=1e12, float32=1e11, bandwidth=1e12)
    advice = dict(dry_run(options(tmp_path), small))["verdict"]
    assert advice.startswith("it does not fit. With --from-disk it does not fit either: one GPU")
    assert "A block-FP8 checkpoint of the model takes half the memory" in advice
    alone = dict(dry_run(options(tmp_path, from_disk=True), small))
    assert "give a shorter --context, or fewer --rows" in alone["verdict"]
    assert "GPU 1" not in alone


def test_a_stage_is_counted_at_its_own_length(tmp_path: Path) -> None:
    checkpoint(tmp_path)

    def planned(**changes: object) -> HealPlan:
        return plan_of(options(tmp_path, sparse_steps=2, lr=1e-3, **changes), MACHINE)

    short, mixed = planned(), planned(sparse_length=4 * LENGTH)
    long = planned(length=4 * LENGTH)
    assert short.hours < mixed.hours < long.hours
    assert short.peak < mixed.peak


def test_several_rows_keep_several_gpus_busy(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    single, eight = (
        plan_of(options(tmp_path, rows=rows, dense_steps=8 // rows, lr=1e-3), MACHINE)
        for rows in (1, 8)
    )
    assert single.busy == pytest.approx(1)
    assert 1.2 < eight.busy < 2
    assert eight.hours == pytest.approx(single.hours / eight.busy)


def test_gpus_are_written_as_a_count_and_a_name() -> None:
    assert counted_gpus("8xh200") == (8, "h200")
    with pytest.raises(TrainingError, match="8xh200, got 'h200'"):
        counted_gpus("h200")
