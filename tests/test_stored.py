"""A checkpoint made from another keeps every tensor that it does not change, bit for bit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM

from sglang_indexcache.errors import TrainingError
from sglang_indexcache.heal.convert import convert
from sglang_indexcache.heal.run_folder import read_metrics
from sglang_indexcache.heal.trainer import Trainer
from sglang_indexcache.stored import check_trainable_dtypes, to_block_fp8
from tests.heal.models import FIELDS
from tests.heal.recipes import tiny, tiny_recipe
from tests.heal.tokenizers import tokenizer

LAYERS = 3
BIAS = "mlp.gate.e_score_correction_bias"
Tensors = dict[str, torch.Tensor]


def stored(folder: Path) -> Tensors:
    found: Tensors = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(
        one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
    )


def write_moe(folder: Path) -> Path:
    """In the format of released models: bfloat16, router biases in float32, and an MTP layer."""
    fields = {k: v for k, v in FIELDS.items() if not k.startswith("index_")}
    changes = {"vocab_size": 700, "num_hidden_layers": LAYERS, "first_k_dense_replace": 1}
    config = Glm4MoeLiteConfig(**{**fields, **changes}, dtype="bfloat16")
    Glm4MoeLiteForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    for name in tensors:
        if name.endswith(BIAS):
            tensors[name] = 6 + 0.05 * torch.randn(tensors[name].shape)  # real ones are like this
    mtp = f"model.layers.{LAYERS}."
    tensors[f"{mtp}eh_proj.weight"] = torch.randn(32, 64).bfloat16()
    tensors[f"{mtp}{BIAS}"] = 6 + 0.05 * torch.randn(4)
    tensors[f"{mtp}self_attn.indexer.wk.weight"] = torch.randn(16, 32).bfloat16()
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


@pytest.fixture
def moe(tmp_path: Path) -> Path:
    return write_moe(tmp_path / "moe")


@pytest.fixture
def dsa(moe: Path, tmp_path: Path) -> Path:
    convert(moe, tmp_path / "dsa", index_topk=8, index_n_heads=2, index_head_dim=16)
    return tmp_path / "dsa"


def added(before: Tensors, after: Tensors) -> set[str]:
    """Names that are new; everything else must be the same."""
    assert sum(name.endswith(BIAS) and t.dtype == torch.float32 for name, t in before.items()) == 3
    for name, tensor in before.items():
        assert same_bits(tensor, after[name]), name
    return after.keys() - before.keys()


def test_conversion_adds_indexers_and_changes_nothing(moe: Path, dsa: Path) -> None:
    new = added(stored(moe), stored(dsa))
    assert len(new) == LAYERS * 5
    assert all(".indexer." in name for name in new)
    assert {stored(dsa)[name].dtype for name in new} == {torch.bfloat16}
    _, report = AutoModelForCausalLM.from_pretrained(dsa, output_loading_info=True)
    assert not report["missing_keys"]
    assert all(f"layers.{LAYERS}." in name for name in report["unexpected_keys"])


def warmed_up(dsa: Path, folder: Path, **changes: Any) -> Path:
    recipe = tiny_recipe(
        pattern="FSF",
        eval_rows=1,
        **{
            "model": {"checkpoint": dsa},
            "dtype": None,
            "stages": [{**tiny()["stages"][1], "steps": 2, "indexer_lr": 0.1}],
            **changes,
        },
    )
    return Trainer(recipe, folder, Console(quiet=True)).run()


def test_training_leaves_router_biases_alone(dsa: Path, tmp_path: Path) -> None:
    """They are buffers of the balancing that pretraining did, no parameters of a loss."""
    stage = {**tiny()["stages"][2], "steps": 2, "lr": 0.1}
    before, after = stored(dsa), stored(warmed_up(dsa, tmp_path / "run", stages=[stage]))
    gates = {name for name in after if ".mlp.gate." in name and f"layers.{LAYERS}." not in name}
    biases = {name for name in gates if name.endswith(BIAS)}
    assert len(biases) == LAYERS - 1
    assert all(same_bits(before[name], after[name]) == (name in biases) for name in gates)


def test_warm_up_changes_the_indexers_that_stay_and_nothing_else(dsa: Path, tmp_path: Path) -> None:
    before, after = stored(dsa), stored(warmed_up(dsa, tmp_path / "run"))
    gone = {name for name in before if name.startswith("model.layers.1.self_attn.indexer.")}
    assert before.keys() - after.keys() == gone
    changed = {name for name, t in after.items() if not same_bits(t, before[name])}
    owners = [f"model.layers.{i}.self_attn.indexer." for i in (0, 2)]
    assert changed
    assert all(name.startswith(tuple(owners)) for name in changed)
    assert all(after[name].dtype == before[name].dtype for name in changed)


def test_a_bfloat16_body_is_frozen_and_its_indexers_are_float32(dsa: Path, tmp_path: Path) -> None:
    """Half the memory, the same training but for rounding, and again nothing else changes."""
    lines = {}
    for dtype in ("float32", "bfloat16"):
        model = {"checkpoint": dsa, "dtype": dtype}
        after = stored(warmed_up(dsa, tmp_path / dtype, model=model))
        lines[dtype] = [line for line in read_metrics(tmp_path / dtype) if "index" in line]
        for name, tensor in after.items():
            assert ".indexer." in name or same_bits(tensor, stored(dsa)[name]), name
    for wide, half in zip(lines["float32"], lines["bfloat16"], strict=True):
        assert half["index"] == pytest.approx(wide["index"], rel=0.05)
    recipe = tiny_recipe(
        model={"checkpoint": dsa, "dtype": "bfloat16"}, pattern="FSF", stages=[tiny()["stages"][1]]
    )
    built = Trainer(recipe, tmp_path / "built", Console(quiet=True)).model
    assert {p.dtype for p in built.indexer_parameters()} == {torch.float32}
    assert {p.dtype for p in built.body_parameters()} == {torch.bfloat16}


def test_an_asked_for_dtype_spares_what_must_stay_in_float32(dsa: Path, tmp_path: Path) -> None:
    after = stored(warmed_up(dsa, tmp_path / "run", dtype="float16"))
    own = {name: t for name, t in after.items() if f"layers.{LAYERS}." not in name}
    assert {t.dtype for name, t in own.items() if name.endswith(BIAS)} == {torch.float32}
    assert {t.dtype for name, t in own.items() if not name.endswith(BIAS)} == {torch.float16}


def test_shards_are_numbered_and_listed(dsa: Path) -> None:
    names = sorted(path.name for path in dsa.glob("model*"))
    assert names == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]


def test_writing_again_replaces_what_was_there_and_never_the_source(moe: Path, dsa: Path) -> None:
    before = stored(dsa)
    (dsa / "model-00003-of-00003.safetensors").write_bytes(b"of an interrupted run")
    convert(moe, dsa, index_topk=8, index_n_heads=2, index_head_dim=16)
    assert stored(dsa).keys() == before.keys()
    with pytest.raises(TrainingError, match="write to another folder"):
        convert(moe, moe)


def test_quantised_weights_are_refused_before_they_are_loaded(moe: Path, tmp_path: Path) -> None:
    (path,) = moe.glob("*.safetensors")
    tensors = load_file(path)
    name = "model.layers.0.self_attn.q_a_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, path)
    with pytest.raises(TrainingError, match=r"q_a_proj\.weight as F8_E4M3"):
        check_trainable_dtypes(moe)
    with pytest.raises(TrainingError, match="Dequantise"):
        convert(moe, tmp_path / "out")


@given(
    shape=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    block=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    power_of_two=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_block_fp8_keeps_what_its_format_can(
    shape: tuple[int, int], block: tuple[int, int], power_of_two: bool, seed: int
) -> None:
    """Against each block looked at alone, in float64."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator) * 10.0 ** int(seed % 7 - 3)
    weight[0] = 0  # a block may hold nothing
    values, scales = to_block_fp8(weight, block, power_of_two=power_of_two)
    assert values.shape == shape
    for i in range(0, shape[0], block[0]):
        for j in range(0, shape[1], block[1]):
            part = np.s_[i : i + block[0], j : j + block[1]]
            scale = float(scales[i // block[0], j // block[1]])
            wanted = weight[part].double()
            largest = float(wanted.abs().max())
            assert scale > 0
            assert largest <= 448 * scale * (1 + 1e-6)
            if largest:
                assert scale <= largest / 448 * (2 if power_of_two else 1) * (1 + 1e-6)
            if power_of_two:
                assert math.frexp(scale)[0] == 0.5
            # Half a step: 3 bits behind the leading one, and steps of 2^-9 below 2^-6.
            error = (values[part].double() * scale - wanted).abs()
            assert (error <= (wanted.abs() * 2**-4).clamp_min(scale * 2**-10) * (1 + 1e-6)).all()


def test_what_is_block_fp8_already_stays_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(3)
    values = (torch.randn(256, 384, generator=generator) * 60).clamp(-448, 448)
    values[::128, ::128] = 448.0  # the largest of each block, as quantising leaves it
    values = values.to(torch.float8_e4m3fn)
    scales = torch.exp2(torch.randint(-9, 3, (2, 3), generator=generator).float())
    blocks = torch.ones(128, 128)
    again, same = to_block_fp8(values.float() * torch.kron(scales, blocks))
    assert same_bits(again, values)
    assert torch.equal(same, scales)
