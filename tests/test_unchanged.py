"""Tests of compiled code run when something changed, and only then."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unchanged import ROOT, SOURCES, digest

MADE = """
import pytest
from pathlib import Path

@pytest.mark.csrc
@pytest.mark.parametrize("name", ["right", "wrong", "skipped"])
def test_it(name):
    with Path("ran").open("a") as file: file.write(name + " ")
    if name == "skipped": pytest.skip("no compiler")
    assert name == "right" or Path("mended").exists()

def test_other(): Path("other").touch()
"""


def run(folder: Path, *options: str) -> list[str]:
    """Return the tests that run; the folder's ``source`` stands for the repository's sources."""
    (folder / "test_made.py").write_text(MADE)
    (folder / "conftest.py").write_text(
        "from tests import unchanged\n"
        "def digest(): return open('source').read()\n"
        "unchanged.digest = digest\n"
        "pytest_plugins = ['tests.unchanged']\n"
    )
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = csrc: compiled\n")
    (folder / "ran").unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", *options, "test_made.py"]
    environment = {name: os.environ[name] for name in ("PATH",)} | {"PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False)
    assert (folder / "other").exists()
    return (folder / "ran").read_text().split() if (folder / "ran").exists() else []


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["one process", "xdist"])
def test_what_passed_is_left_out_until_something_changes(
    tmp_path: Path, workers: tuple[str, ...]
) -> None:
    (tmp_path / "source").write_text("one")
    assert sorted(run(tmp_path, *workers)) == ["right", "skipped", "wrong"]
    assert sorted(run(tmp_path, *workers)) == ["skipped", "wrong"], "what has not passed runs again"
    (tmp_path / "mended").touch()
    assert "wrong" in run(tmp_path, *workers)
    assert run(tmp_path, *workers) == ["skipped"]
    assert len(run(tmp_path, "--csrc", *workers)) == 3
    (tmp_path / "source").write_text("two")
    assert len(run(tmp_path, *workers)) == 3


def test_the_digest_is_of_content(tmp_path: Path) -> None:
    sources = ("csrc", "one.py")
    (tmp_path / "csrc" / "deep").mkdir(parents=True)
    (tmp_path / "csrc" / "deep" / "a.cu").write_text("a")
    (tmp_path / "one.py").write_text("1")
    first = digest(tmp_path, sources)
    assert digest(tmp_path, sources) == first
    (tmp_path / "csrc" / "deep" / "a.cu").write_text("b")
    second = digest(tmp_path, sources)
    (tmp_path / "csrc" / "b.cuh").write_text("")
    assert len({first, second, digest(tmp_path, sources)}) == 3


@pytest.mark.parametrize("settings", ["tests/conftest.py", "pyproject.toml"])
def test_the_settings_of_all_tests_count(tmp_path: Path, settings: str) -> None:
    (tmp_path / "tests").mkdir()
    before = digest(tmp_path)
    (tmp_path / settings).write_text("changed")
    assert digest(tmp_path) != before


def test_the_compiler_that_is_used_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA_HOME's compiler counts: what passed with one nvcc says nothing of another."""
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho another\n")
    nvcc.chmod(0o755)
    before = digest(tmp_path)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert digest(tmp_path) != before


def test_every_source_is_there() -> None:
    assert all((ROOT / source).exists() for source in SOURCES)
