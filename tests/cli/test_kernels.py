"""``indexcache kernels``, without a compiler."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from sglang_indexcache.cli import app
from sglang_indexcache.errors import KernelError
from sglang_indexcache.kernels import build, disassembly
from sglang_indexcache.kernels.compilers import KNOWN_BAD

BAD = next(iter(KNOWN_BAD))


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Every library, by a compiler that a test may change."""
    log = tmp_path / "log"
    log.write_text("")
    library = SimpleNamespace(fresh=True, path=tmp_path / "built.so", compiler=BAD, log=log)
    monkeypatch.setattr(build, "build", lambda folder, say: library)
    monkeypatch.setattr(build, "nvcc_version", lambda: library.compiler)
    monkeypatch.setattr(disassembly, "usage", lambda text: [])
    return library


def said() -> str:
    done = CliRunner().invoke(app, ["kernels", "build"])
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


def test_a_bad_compiler_is_named_before_minutes_are_spent(built: Any) -> None:
    output = said()
    assert output.startswith("No default on a Hopper: nvcc")
    assert output.count("No default") == 1


def test_a_cache_of_a_bad_compiler_is_named_too(
    built: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise KernelError("there is no nvcc")

    monkeypatch.setattr(build, "nvcc_version", missing)
    assert said().count("No default") == 1
    built.compiler = (99, 0, 0)
    assert "No default" not in said()
