"""Planned bytes beside those that a run holds, and what a dry run advises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from sglang_indexcache.lab.heal.dry_run import _peaks, memory_needed
from sglang_indexcache.lab.heal.forward_state import ForwardState, LocalSharing, Stage
from sglang_indexcache.lab.heal.frozen import FrozenBody, Passing
from sglang_indexcache.lab.heal.heal import HealOptions, Target
from sglang_indexcache.lab.heal.packing import Layout
from sglang_indexcache.library.sizes import ModelShape
from sglang_indexcache.pattern import Pattern
from tests.lab.heal import models
from tests.lab.heal.checkpoints import checkpoint, quantise
from tests.lab.heal.models import LAYERS, tokens
from tests.lab.heal.test_frozen import Memory

LENGTH = 40


def options(folder: Path, **changes: object) -> HealOptions:
    required = {"checkpoint": folder, "pattern": "FSFS", "data": (), "output": folder / "out"}
    return HealOptions(**{**required, "length": LENGTH, "dense_steps": 2, **changes})  # type: ignore[arg-type]


def shape_of(folder: Path) -> ModelShape:
    shape = ModelShape.from_config(AutoConfig.from_pretrained(folder))
    assert shape is not None
    return shape


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
def test_the_fullest_device_holds_no_more_than_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, stage: Stage
) -> None:
    """Every tensor that a step makes is counted, and not many that it does not make."""
    fields = {**models.FIELDS, "index_topk": 64, **FULLEST_AT[moment]}
    monkeypatch.setattr(models, "FIELDS", fields)
    checkpoint(tmp_path, dtype=torch.bfloat16)
    dense, length, devices = int(stage is Stage.WARMUP), 384, 2
    if dense:
        quantise(tmp_path)
    steps = {"dense_steps": dense, "sparse_steps": 1 - dense, "lr": 1e-3}
    settings = options(tmp_path, pattern="FSFS", length=length, block=16, **steps)
    planned = _peaks(settings, Target.of(settings), shape_of(tmp_path), devices)

    ids, positions = tokens(1, length), torch.arange(length)[None]
    with Memory() as memory:
        sharing = LocalSharing(Pattern("FSFS"), 64, block=16)
        cpus = [torch.device("cpu")] * devices
        body = FrozenBody(tmp_path, Pattern("FSFS"), sharing, torch.bfloat16, cpus)
        resident = []
        for number in range(LAYERS):
            before = memory._alive
            body.layer(number)
            resident.append(memory._alive - before)
        passing = Passing(
            ForwardState(stage, Layout(torch.zeros_like(ids)), length),
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
    layers = [f"layers {share.start} to {share.stop - 1}" for share in body.shares]
    assert [what for what, _ in planned] == layers
    assert max(measured) < max(peak for _, peak in planned) < 3 * max(measured)


def test_a_dry_run_needs_no_weights_and_says_what_helps(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    planned = dict(memory_needed(options(tmp_path), "2xh200"))
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    assert dict(memory_needed(options(tmp_path), "2xh200")) == planned
    assert planned["verdict"] == "it fits"
    assert "GPU 1" in planned
    assert "GPU 1" not in dict(memory_needed(options(tmp_path, from_disk=True), "2xh200"))
    longest = options(tmp_path, length=10**9)
    assert "a shorter --context, fewer --rows" in dict(memory_needed(longest, "2xh200"))["verdict"]


def test_a_stage_is_counted_at_its_own_length(tmp_path: Path) -> None:
    checkpoint(tmp_path)

    def planned(**changes: object) -> float:
        settings = options(tmp_path, sparse_steps=2, **changes)
        [(_, peak)] = _peaks(settings, Target.of(settings), shape_of(tmp_path), 1)
        return peak

    assert planned() < planned(sparse_length=4 * LENGTH) == planned(length=4 * LENGTH)
