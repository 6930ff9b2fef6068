"""Marks that tell checkpoints apart."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from sglang_indexcache.errors import CheckpointError
from sglang_indexcache.library import digest
from sglang_indexcache.library.digest import checkpoint_digest


def test_a_digest_needs_a_checkpoint_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"needs config.json and \*.safetensors"):
        checkpoint_digest(tmp_path)
    (tmp_path / "model.safetensors").symlink_to("blob")
    with pytest.raises(CheckpointError, match=r"cannot read .*model\.safetensors: No such file"):
        checkpoint_digest(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    before = checkpoint_digest(tmp_path)
    assert before == checkpoint_digest(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"Weights")
    assert checkpoint_digest(tmp_path) != before


def test_a_digest_sees_any_trained_tensor_of_a_large_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(digest, "_WHOLE_BYTES", 1 << 10)
    monkeypatch.setattr(digest, "_SAMPLE_BYTES", 64)
    (tmp_path / "config.json").write_text("{}")
    path = tmp_path / "model.safetensors"
    generator = np.random.default_rng(0)
    shapes = {"scalar": (), "norm": (7,), "even": (64, 32), "odd": (33, 31)}
    tensors = {
        name: np.asarray(generator.normal(size=shape), np.float32) for name, shape in shapes.items()
    }
    save_file(tensors, path)
    digests = {checkpoint_digest(tmp_path)}
    for name, tensor in tensors.items():
        save_file(tensors | {name: np.asarray(tensor + np.float32(0.01))}, path)
        digests.add(checkpoint_digest(tmp_path))
    edited = tensors["even"].copy()
    edited[0, 0] += 1  # what the docstring says it misses
    save_file(tensors | {"even": edited}, path)
    assert len(digests | {checkpoint_digest(tmp_path)}) == 1 + len(tensors)


def test_a_large_file_that_is_no_safetensors_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(digest, "_WHOLE_BYTES", 8)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"no safetensors header")
    with pytest.raises(CheckpointError, match="is not a safetensors file"):
        checkpoint_digest(tmp_path)
