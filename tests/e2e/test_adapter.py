"""An adapter served over its unchanged base answers as transformers does with the merged weights.

Its indexers are the base's with noise, which is enough to make them select other tokens; those of
the block-FP8 checkpoint are healed.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from sglang_indexcache.lab.client.http import Client
from sglang_indexcache.lab.heal.heal import HealOptions, heal
from sglang_indexcache.lab.heal.merge import merge
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.adapters.folder import Adapter, indexer_layer
from sglang_indexcache.serving.adapters.weights import SCALES, dequantised
from sglang_indexcache.serving.adapters.writing import write_adapter
from tests.e2e.conftest import Serve, batch_logprobs, decided_prompt, logprobs
from tests.e2e.test_parallel import SMALL_POOL, TWO_RANKS, check
from tests.lab.heal.checkpoints import quantise
from tests.oracle import Oracle

PATTERN = Pattern("FFSFSS")  # a pipeline's second stage, which has three layers too, starts on F
LENGTHS = (1, 300, 66, 129)


@pytest.fixture(scope="module")
def adapter(glm: Path, tmp_path_factory: pytest.TempPathFactory) -> Adapter:
    generator = torch.Generator().manual_seed(15)
    tensors = {
        name: tensor + 0.5 * tensor.std() * torch.randn(tensor.shape, generator=generator)
        if tensor.std() > 0
        else tensor + 0.1 * torch.randn(tensor.shape, generator=generator)
        for path in glm.glob("*.safetensors")
        for name, tensor in load_file(path).items()
        if indexer_layer(name) in PATTERN.full_layers
    }
    folder = tmp_path_factory.mktemp("adapter") / "noise"
    return write_adapter(folder, pattern=PATTERN, checkpoint=glm, tensors=tensors, record={})


@pytest.fixture(scope="module")
def merged(glm: Path, adapter: Adapter, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder = tmp_path_factory.mktemp("merged") / "checkpoint"
    merge(adapter.folder, glm, folder, lambda _: None)
    return Oracle(folder, torch.float32)


@dataclass(frozen=True)
class Healed:
    """A block-FP8 checkpoint and what healing made of it.

    Attributes:
        folder: the checkpoint.
        adapter: trained on it for a few steps.
        merged: both as one checkpoint, in block-FP8 too.
    """

    folder: Path
    adapter: Adapter
    merged: Path


@pytest.fixture(scope="module")
def healed(glm: Path, tmp_path_factory: pytest.TempPathFactory) -> Healed:
    folder = tmp_path_factory.mktemp("fp8")
    shutil.copytree(glm, folder / "base")
    quantise(folder / "base")
    options = HealOptions(
        folder / "base",
        str(PATTERN),
        ("machine",),
        folder / "adapter",
        dense_steps=3,
        held_out=2,
        rows=2,
        lr=0.03,
        dtype="float32",
    )
    adapter = heal(options, Console(quiet=True)).adapter
    merge(adapter.folder, folder / "base", folder / "merged", lambda _: None)
    return Healed(folder / "base", adapter, folder / "merged")


def dequantised_oracle(folder: Path, to: Path) -> Oracle:
    """Transformers with a block-FP8 checkpoint's weights, multiplied by their scales."""
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    blocks = config.pop("quantization_config")["weight_block_size"]
    (to / "config.json").write_text(json.dumps(config))
    for path in to.glob("*.safetensors"):
        tensors = load_file(path)
        plain = {
            name: dequantised(t, tensors[name + SCALES], blocks) if name + SCALES in tensors else t
            for name, t in tensors.items()
            if not name.endswith(SCALES)
        }
        save_file(plain, path, metadata={"format": "pt"})
    return Oracle(to, torch.float32)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return all of a checkpoint, as bytes."""
    files = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    return {n: t.flatten().view(torch.uint8) for file in files for n, t in file.items()}


def test_a_block_fp8_checkpoint_healed_and_served(
    healed: Healed, serve: Serve, tmp_path: Path
) -> None:
    """Static, over the unchanged checkpoint; nothing but indexers differs from it by a bit."""
    before = {path.name: path.read_bytes() for path in healed.folder.iterdir()}
    untouched, merged = tensors_of(healed.folder), tensors_of(healed.merged)
    body = {name for name in merged if indexer_layer(name.removesuffix(SCALES)) is None}
    assert body == {n for n in untouched if indexer_layer(n.removesuffix(SCALES)) is None}
    assert sum(name.endswith(SCALES) for name in body) > 20
    assert all(torch.equal(merged[name], untouched[name]) for name in body)
    oracle_of_merged = dequantised_oracle(healed.merged, tmp_path / "merged")
    base = dequantised_oracle(healed.folder, tmp_path / "base")
    arguments = ["--indexcache-adapter", str(healed.adapter.folder)]
    arguments += ["--indexcache-pattern", str(PATTERN), "--dtype", "float32"]
    with serve(healed.folder, *SMALL_POOL, *arguments) as client:
        [state] = client.states()
        assert state.pattern == str(PATTERN)
        assert state.adapter == str(healed.adapter.folder)
        assert state.adapter_digest == healed.adapter.digest
        check(client, oracle_of_merged, PATTERN, LENGTHS)
        ids = decided_prompt(oracle_of_merged, 300, PATTERN)
        without = base.answer(ids, PATTERN).logprobs
        assert (logprobs(client, ids) - without).abs().max() > 1e-2
    assert {path.name: path.read_bytes() for path in healed.folder.iterdir()} == before


def _agrees(client: Client, oracle: Oracle, pattern: Pattern) -> None:
    """Prompts of unequal lengths in one request, which data-parallel ranks deal out."""
    prompts = [decided_prompt(oracle, length, pattern, seed=700) for length in LENGTHS]
    for ids, measured in zip(prompts, batch_logprobs(client, prompts), strict=True):
        torch.testing.assert_close(
            measured, oracle.answer(ids, pattern).logprobs, rtol=0, atol=1e-3
        )


@pytest.mark.parametrize(
    "spread",
    [["--pp-size", "2"], ["--tp", "2", "--dp", "2", "--enable-dp-attention"]],
    ids=["pipeline", "dp_attention"],
)
def test_over_two_ranks(
    glm: Path, adapter: Adapter, merged: Oracle, serve: Serve, spread: list[str]
) -> None:
    arguments = [*spread, "--indexcache-adapter", str(adapter.folder)]
    with serve(glm, *SMALL_POOL, *arguments, **TWO_RANKS) as client:
        _agrees(client, merged, PATTERN)
