"""Marks that identify a checkpoint, a machine and its software."""

import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from sglang_indexcache.errors import CheckpointError
from sglang_indexcache.study import provenance
from sglang_indexcache.study.provenance import checkpoint_digest, commit, machine, output_lines


def test_a_digest_needs_a_checkpoint_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"needs config.json and \*.safetensors"):
        checkpoint_digest(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    before = checkpoint_digest(tmp_path)
    assert before == checkpoint_digest(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"Weights")
    assert checkpoint_digest(tmp_path) != before


def test_a_digest_sees_any_trained_tensor_of_a_large_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(provenance, "_WHOLE_BYTES", 1 << 10)
    monkeypatch.setattr(provenance, "_SAMPLE_BYTES", 64)
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
    monkeypatch.setattr(provenance, "_WHOLE_BYTES", 8)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"no safetensors header")
    with pytest.raises(CheckpointError, match="is not a safetensors file"):
        checkpoint_digest(tmp_path)


def test_a_machine_says_where_and_with_what() -> None:
    facts = machine()
    assert facts["cores"] >= 1
    assert facts["cpu"]
    assert facts["versions"]["python"].startswith(f"{sys.version_info.major}.")
    assert facts["date"].endswith("Z")


def test_a_commit_from_outside_a_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(provenance, "_ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.delenv("INDEXCACHE_COMMIT", raising=False)
    assert commit() == ""
    monkeypatch.setenv("INDEXCACHE_COMMIT", "abc")
    assert commit() == "abc"


def test_a_command_that_fails_says_nothing() -> None:
    assert output_lines(["no-such-command"]) == []
    assert output_lines([sys.executable, "-c", "raise SystemExit(1)"]) == []
    assert output_lines([sys.executable, "-c", "print('a'); print('b')"]) == ["a", "b"]


def test_provenance_needs_no_package() -> None:
    """The device check uses it where only torch is installed."""
    code = (
        "import sys; import sglang_indexcache.study.provenance; "
        "print({name.partition('.')[0] for name in sys.modules} & {'pydantic', 'torch', 'numpy'})"
    )
    assert output_lines([sys.executable, "-c", code]) == ["set()"]
