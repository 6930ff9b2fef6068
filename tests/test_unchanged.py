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
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", *options, "test_made.py"]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False)
    return (folder / "ran").read_text().split() if (folder / "ran").exists() else []


def test_what_passed_is_left_out_until_something_changes(tmp_path: Path) -> None:
    (tmp_path / "source").write_text("one")
    assert sorted(run(tmp_path)) == ["right", "skipped", "wrong"]
    assert sorted(run(tmp_path)) == ["skipped", "wrong"], "what has not passed runs again"
    (tmp_path / "mended").touch()
    assert "wrong" in run(tmp_path)
    assert run(tmp_path) == ["skipped"]
    assert len(run(tmp_path, "--csrc")) == 3
    (tmp_path / "source").write_text("two")
    assert len(run(tmp_path)) == 3


def test_the_digest_is_of_sources_settings_and_compilers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all((ROOT / source).exists() for source in SOURCES)
    digests = {digest(tmp_path)}
    for number, path in enumerate(
        ("csrc/deep/a.cu", "csrc/b.cuh", "tests/conftest.py", "pyproject.toml"), start=2
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("changed")
        digests.add(digest(tmp_path))
        assert digest(tmp_path) in digests
        assert len(digests) == number, path
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho another\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert digest(tmp_path) not in digests, "what passed with one nvcc says nothing of another"
