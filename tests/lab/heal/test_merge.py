"""An adapter and its base as one checkpoint: what changes, and that nothing else does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_indexcache.checkpoint import Checkpoint
from sglang_indexcache.errors import CheckpointError, IndexCacheError, OutputError, TrainingError
from sglang_indexcache.lab.heal.merge import merge
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.adapters.folder import Adapter, indexer_shapes
from sglang_indexcache.serving.adapters.weights import SCALES, to_block_fp8
from sglang_indexcache.serving.adapters.writing import write_adapter
from tests.full_disk import files_of_at_most
from tests.kills import kill_at_each_touch
from tests.serving.adapters.test_weights import read_tensors, same_bits

PATTERN = Pattern("FSF")
SHAPE = {"hidden_size": 160, "q_lora_rank": 96, "index_n_heads": 3, "index_head_dim": 64}
CONFIG = {
    **SHAPE,
    "architectures": ["GlmMoeDsaForCausalLM"],
    "num_hidden_layers": 3,
    "index_topk": 8,
    "index_topk_freq": 1,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}


def indexer(layer: int, *, fp8: bool) -> dict[str, torch.Tensor]:
    """Make one as released models store it: two large projections in block-FP8, a float32 norm."""
    tensors = {}
    for name, shape in indexer_shapes(SHAPE).items():
        full = f"model.layers.{layer}.self_attn.indexer.{name}"
        weight = torch.randn(shape)
        if fp8 and name in ("wq_b.weight", "wk.weight"):
            tensors[full], tensors[full + SCALES] = to_block_fp8(weight)
        else:
            tensors[full] = weight if "norm" in name else weight.bfloat16()
    return tensors


@pytest.fixture(params=[True, False], ids=["fp8", "bfloat16"])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Three files, the second without an indexer; the last layer is an MTP layer."""
    torch.manual_seed(0)
    folder = tmp_path / "base"
    (folder / "extra").mkdir(parents=True)
    shards = [
        {"model.embed_tokens.weight": torch.randn(9, 160).bfloat16()}
        | indexer(0, fp8=request.param)
        | indexer(1, fp8=request.param),
        {"model.layers.1.mlp.gate.e_score_correction_bias": torch.randn(4)},
        {"model.norm.weight": torch.randn(160).half()}
        | indexer(2, fp8=request.param)
        | indexer(3, fp8=request.param),
    ]
    places = {}
    for number, tensors in enumerate(shards):
        save_file(tensors, folder / f"part-{number}.safetensors", metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, f"part-{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "extra" / "LICENSE").write_text("free")
    return folder


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Adapter:
    return adapter_of(base, tmp_path)


def adapter_of(base: Path, tmp_path: Path) -> Adapter:
    tensors = {
        f"model.layers.{layer}.self_attn.indexer.{name}": torch.randn(shape)
        for layer in PATTERN.full_layers
        for name, shape in indexer_shapes(SHAPE).items()
    }
    folder = tmp_path / "adapter"
    return write_adapter(folder, pattern=PATTERN, checkpoint=base, tensors=tensors, record={})


def quiet(_: str) -> None:
    pass


def test_only_the_indexers_change(base: Path, adapter: Adapter, tmp_path: Path) -> None:
    lines: list[str] = []
    output = tmp_path / "merged"
    merge(adapter.folder, base, output, lines.append)
    assert lines == [f"{n + 1} of 3: part-{n}.safetensors" for n in range(3)]
    before, after, trained = read_tensors(base), read_tensors(output), adapter.tensors()
    assert after.keys() == {n for n in before if not n.startswith("model.layers.1.self_attn")}
    for name, tensor in after.items():
        weight = name.removesuffix(SCALES)
        if weight not in trained:
            assert same_bits(tensor, before[name]), name
            continue
        assert (tensor.dtype, tensor.shape) == (before[name].dtype, before[name].shape)
        if name != weight or name + SCALES in after:
            values, scales = to_block_fp8(trained[weight])
            assert same_bits(tensor, scales if name != weight else values)
        else:
            assert same_bits(tensor, trained[name].to(tensor.dtype))
    index = json.loads((output / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == after.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in after.values())
    for name, file in index["weight_map"].items():
        assert name in load_file(output / file)
    config = json.loads((output / "config.json").read_text())
    assert Checkpoint.read(output).own == PATTERN
    assert config["quantization_config"] == CONFIG["quantization_config"]
    assert "index_topk_freq" not in config
    assert (output / "tokenizer.json").exists()
    assert (output / "extra" / "LICENSE").read_text() == "free"
    link, original = output / "part-1.safetensors", base / "part-1.safetensors"
    assert link.samefile(original)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base", "merged"]


def test_killed_at_any_moment_it_leaves_no_half_checkpoint(
    base: Path, adapter: Adapter, tmp_path: Path
) -> None:
    """Each run goes on from what the killed one left; in the end all is as in one run."""
    merged, undisturbed = tmp_path / "merged", tmp_path / "whole"
    merge(adapter.folder, base, undisturbed, quiet)
    names = sorted(path.name for path in undisturbed.iterdir())
    kills = 0
    for _ in kill_at_each_touch(lambda: merge(adapter.folder, base, merged, quiet)):
        kills += 1
        if merged.exists():
            assert sorted(path.name for path in merged.iterdir()) == names
            break
    assert kills > 20
    once, again = read_tensors(merged), read_tensors(undisturbed)
    assert once.keys() == again.keys()
    assert all(same_bits(tensor, again[name]) for name, tensor in once.items())


@pytest.mark.parametrize("size", [100, 2000, 20000])
def test_on_a_full_disk_it_ends_in_a_sentence_and_goes_on_once_there_is_room(
    base: Path, adapter: Adapter, tmp_path: Path, size: int
) -> None:
    (base / "tokenizer.json").write_bytes(bytes(3000))
    folder = adapter_of(base, tmp_path / "of this base").folder
    with files_of_at_most(size), pytest.raises(OutputError, match=r"cannot write .*make room"):
        merge(folder, base, tmp_path / "merged", quiet)
    assert not (tmp_path / "merged").exists()
    merge(folder, base, tmp_path / "merged", quiet)
    merge(folder, base, tmp_path / "again", quiet)
    once, again = read_tensors(tmp_path / "merged"), read_tensors(tmp_path / "again")
    assert all(same_bits(tensor, again[name]) for name, tensor in once.items())
    assert not list(tmp_path.glob(".*"))


def test_two_commands_that_merge_into_one_folder(
    base: Path, adapter: Adapter, tmp_path: Path
) -> None:
    def second_merge(_: str) -> None:
        with pytest.raises(TrainingError, match="is in use by another merge"):
            merge(adapter.folder, base, tmp_path / "merged", quiet)

    merge(adapter.folder, base, tmp_path / "merged", second_merge)


def test_what_is_refused(base: Path, adapter: Adapter, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="is not empty"):
        merge(adapter.folder, base, adapter.folder, quiet)
    with pytest.raises(IndexCacheError, match="is not an adapter"):
        merge(base, base, tmp_path / "merged", quiet)
    config = base / "config.json"
    config.write_text(json.dumps(CONFIG | {"rope_theta": 5}))
    with pytest.raises(CheckpointError, match="is another checkpoint"):
        merge(adapter.folder, base, tmp_path / "merged", quiet)
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("base", [False], indirect=True)
def test_a_base_whose_indexers_are_stored_in_another_form(base: Path, tmp_path: Path) -> None:
    path = base / "part-2.safetensors"
    tensors = load_file(path)
    name = "model.layers.2.self_attn.indexer.wk.weight"
    tensors[name] = tensors[name].char()
    save_file(tensors, path)
    folder = adapter_of(base, tmp_path).folder
    with pytest.raises(CheckpointError, match=r"indexer.wk.weight as I8; other weights can take"):
        merge(folder, base, tmp_path / "merged", quiet)
