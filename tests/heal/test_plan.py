"""The plan of a training run against numbers worked out by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from sglang_indexcache.bench.shapes import PRESETS, ModelShape
from sglang_indexcache.errors import TrainingError
from sglang_indexcache.heal.plan import FORMULAS, Assumptions, fewest_gpus, plan
from sglang_indexcache.pattern import Pattern

# Four layers, the first without experts. Small, so that a person can check every product.
SMALL = ModelShape(
    name="small",
    layers=4,
    hidden=10,
    heads=2,
    q_lora=6,
    kv_lora=4,
    nope=3,
    rope=2,
    v=5,
    index_heads=2,
    index_dim=8,
    topk=4,
    experts=8,
    active_experts=2,
    expert_width=5,
    shared_experts=1,
    dense_layers=1,
    dense_width=20,
    vocab=100,
)
# One byte a GB and one FLOP/s a TFLOP/s would be clearer; the class has the units that people use.
ASSUMED = Assumptions(
    gpus=2,
    gpu_memory=1.0,
    million_tokens=1.0,
    length=7,
    rows=3,
    mfu=0.5,
    bf16_tflops=1e-6,
    float32_tflops=5e-7,
    weight_bytes=2.0,
    disk_rate=1e-6,
    dense_share=0.25,
    block=3,
)
BY_HAND = {
    # Attention: 10*6 + 6*2*5 + 10*6 + 4*2*8 + 2*5*10 = 60 + 60 + 60 + 64 + 100 = 344.
    "moe": 3 * 10 * 5 * 9 + 80,  # 1430
    "dense_mlp": 600,
    "model": 4 * 344 + 3 * 1430 + 600 + 2000,  # 8266
    # Two experts and the shared one: 3*10*5*3 + 80 = 530.
    "active": 4 * 344 + 3 * 530 + 600,  # 3566
    # 6*2*8 + 10*(8 + 2) = 196, twice.
    "indexers": 392,
    "visible": 4,  # (1 + ... + 7) / 7
    "selected": (1 + 2 + 3 + 4 + 4 + 4 + 4) / 7,
    "body": 2 * 3566 + 4 * 2 * 2 * 10 * 4,  # 7772
    "head": 2000,
    "pair": 2 * 2 * 5 + 6 * 16,  # 116
    "project": 4 * 392,  # 1568
    "dense_loss": 4 * 4 * 116,  # 1856
    "sparse_loss": 2 * 2 * 16 * 4 + 4 * (22 / 7) * 116,
    "heal_body": 1e6 * 7772 / (0.5 * 1e6) / 3600,
    "heal_loss": 1e6 * (1568 + 0.25 * 1856 + 0.75 * (256 + 464 * 22 / 7)) / (0.25 * 1e6) / 3600,
    "train_body": 1e6 * 4 * 9772 / (0.5 * 1e6) / 3600,
    "train_loss": 1e6 * 2 * (1568 + 256 + 464 * 22 / 7) / (0.25 * 1e6) / 3600,
    "heal_weights": 8266,
    "heal_layer_weights": 2 * 1774,
    "heal_state": 16 * 392,
    "layer": 2 * 7 * (20 + 40 + 2 * 35),
    "index": 7 * (8 * 26 + 16),
    "loss": 12 * 3 * 2 * 7,
    "waiting": 3 * (7 * (8 * 26 + 16) + 2 * 7 * (10 + 4)),
    "steps": 1e6 / 21,
    "disk_read": 2 * 6266,  # neither embedding nor head
    "disk_hours": 1e6 / 21 * 12532 / 1000 / 3600,
    "train_state": 16 * (8266 + 392) / 2,
    "train_layer_weights": 8 * 1774,
    "kept": 4 * 4 * 7 * 10,
}


def test_every_step_by_hand() -> None:
    found = plan(SMALL, Pattern("FSFS"), ASSUMED)
    assert {name: found[name] for name in BY_HAND} == pytest.approx(BY_HAND)
    assert found["heal"] == pytest.approx(BY_HAND["heal_body"] + BY_HAND["heal_loss"])
    assert found["heal_wall"] == pytest.approx(found["heal"] / 2)
    assert found["train_wall"] == pytest.approx(found["train"] / 2)
    parts = ("heal_layer_weights", "heal_state", "layer", "waiting", "loss")
    own = sum(BY_HAND[part] for part in parts)
    assert found["heal_memory"] == pytest.approx(BY_HAND["heal_weights"] + own)
    # A layer as it is stored, 2 * (344 + 1430), and the embedding, 2 * 1000.
    assert found["disk_memory"] == pytest.approx(own + 3548 + 2000)
    assert found["disk_wall"] == pytest.approx(found["heal"] + BY_HAND["disk_hours"])
    own = BY_HAND["train_layer_weights"] + BY_HAND["kept"] + 2 * BY_HAND["layer"]
    own += BY_HAND["index"] + BY_HAND["loss"]
    assert found["train_memory"] == pytest.approx(BY_HAND["train_state"] + own)


@pytest.mark.parametrize(
    ("name", "billions"), [("30b", 30), ("glm-5", 744), ("deepseek-v3.2", 671)]
)
def test_the_published_sizes_come_out(name: str, billions: int) -> None:
    """Not a parameter is written down in this package: the shapes give them."""
    shape = PRESETS[name]
    found = plan(shape, Pattern.full(shape.layers), Assumptions())
    assert (found["model"] + found["indexers"]) / 1e9 == pytest.approx(billions, rel=0.01)


def test_the_published_active_sizes_come_out() -> None:
    """GLM-5's page says 40 billion, DeepSeek's 37; both count the output head."""
    for name, billions in (("glm-5", 40), ("deepseek-v3.2", 37)):
        shape = PRESETS[name]
        found = plan(shape, Pattern.full(shape.layers), Assumptions())
        assert found["active"] / 1e9 == pytest.approx(billions, rel=0.05)


def test_fewer_indexers_and_tokens_cost_less() -> None:
    shape = PRESETS["30b"]
    full, quarter = (
        plan(shape, Pattern.uniform(shape.layers, every), Assumptions()) for every in (1, 4)
    )
    for name in ("heal", "train", "heal_memory", "train_memory"):
        assert quarter[name] < full[name]
    twice = plan(
        shape,
        Pattern.uniform(shape.layers, 4),
        dataclasses.replace(Assumptions(), million_tokens=200),
    )
    assert twice["heal"] == pytest.approx(2 * quarter["heal"])
    assert twice["heal_memory"] == quarter["heal_memory"]


def test_fewest_gpus_by_hand() -> None:
    assert fewest_gpus(100, 10, 60) == 2
    assert fewest_gpus(101, 10, 60) == 3
    assert fewest_gpus(100, 60, 60) == float("inf")


def test_verdicts_agree_with_the_numbers() -> None:
    shape, pattern = PRESETS["30b"], Pattern.uniform(47, 4)
    for gpus in (1, 2, 4, 8, 16):
        assumed = Assumptions(gpus=gpus, gpu_memory=80)
        found = plan(shape, pattern, assumed)
        *shared, alone = found.verdicts(assumed)
        for what, sentence in zip(("heal", "train"), shared, strict=True):
            assert (" fits: " in sentence) == (gpus >= found[f"{what}_gpus"]), sentence
        assert "from disk fits on one GPU" in alone
    hopeless = Assumptions(gpu_memory=1.0)
    found = plan(shape, pattern, hopeless)
    *shared, alone = found.verdicts(hopeless)
    assert all("any number" in sentence for sentence in shared)
    assert "from disk does not fit" in alone
    assert [line.shown for line in found.sections["GPUs"]] == ["none", "none"]


@pytest.mark.parametrize(
    "wrong", [{"gpus": 0}, {"mfu": 0.0}, {"mfu": 1.5}, {"dense_share": -0.1}, {"length": -1}]
)
def test_assumptions_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(TrainingError, match=next(iter(wrong))):
        Assumptions(**wrong)


def test_every_step_has_a_name_of_its_own() -> None:
    names = [formula.name for formulas in FORMULAS.values() for formula in formulas]
    fields = {field.name for field in dataclasses.fields(Assumptions)} | set(
        ModelShape.model_fields
    )
    assert len(set(names)) == len(names)
    assert not fields & set(names)
