"""What identifies a checkpoint, a machine and its software."""

import sys
from pathlib import Path

import pytest

from sglang_indexcache.errors import CheckpointError
from sglang_indexcache.support import provenance
from sglang_indexcache.support.provenance import checkpoint_digest, commit, machine, said


def test_a_digest_needs_a_checkpoint_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"needs config.json and \*.safetensors"):
        checkpoint_digest(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    before = checkpoint_digest(tmp_path)
    assert before == checkpoint_digest(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"Weights")
    assert checkpoint_digest(tmp_path) != before


def test_a_machine_says_where_and_with_what() -> None:
    here = machine()
    assert here["cores"] >= 1
    assert here["cpu"]
    assert here["versions"]["python"].startswith(f"{sys.version_info.major}.")
    assert here["date"].endswith("Z")


def test_a_commit_from_outside_a_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(provenance, "_ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.delenv("INDEXCACHE_COMMIT", raising=False)
    assert commit() == ""
    monkeypatch.setenv("INDEXCACHE_COMMIT", "abc")
    assert commit() == "abc"


def test_a_command_that_fails_says_nothing() -> None:
    assert said(["no-such-command"]) == []
    assert said([sys.executable, "-c", "raise SystemExit(1)"]) == []
    assert said([sys.executable, "-c", "print('a'); print('b')"]) == ["a", "b"]


def test_provenance_needs_no_package() -> None:
    """The device check uses it where only torch is installed."""
    code = (
        "import sys; import sglang_indexcache.support.provenance; "
        "print({name.partition('.')[0] for name in sys.modules} & {'pydantic', 'torch', 'numpy'})"
    )
    assert said([sys.executable, "-c", code]) == ["set()"]
