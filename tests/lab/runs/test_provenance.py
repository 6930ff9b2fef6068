"""Marks that identify a machine and its software."""

import sys
from pathlib import Path

import pytest

from sglang_indexcache.lab.runs import provenance
from sglang_indexcache.lab.runs.provenance import commit, machine, output_lines


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
        "import sys; import sglang_indexcache.lab.runs.provenance; "
        "print({name.partition('.')[0] for name in sys.modules} & {'pydantic', 'torch', 'numpy'})"
    )
    assert output_lines([sys.executable, "-c", code]) == ["set()"]
