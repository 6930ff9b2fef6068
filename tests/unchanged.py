"""Tests of compiled device code run when something changed that they depend on.

They are marked ``csrc``: only ``csrc/``, ``kernels/``, their own folder, the settings of all tests
and the tools can break them, and no run draws a seed. So what has passed here passes again until
one of those differs; a fresh clone, in which nothing has passed, runs all of them. ``--csrc`` runs
them in any case.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from tests.seeds import FIXED, SEED

ROOT = Path(__file__).parent.parent
SOURCES = (
    *("csrc", "sglang_indexcache/kernels", "sglang_indexcache/library", "sglang_indexcache/cli"),
    *("sglang_indexcache/errors.py", "tests/kernels", "tests/seeds.py", "tests/conftest.py"),
    "pyproject.toml",  # pytest's settings
)
PACKAGES = ("torch", "numpy", "apache-tvm-ffi", "hypothesis", "pytest")
COMPILERS = ("nvcc", "g++", "c++")
PASSED = "csrc/passed"
"""In pytest's cache: the digest of all that the tests depend on, and which passed with it."""


def digest(root: Path = ROOT, sources: Iterable[str] = SOURCES) -> str:
    """Digest everything that the tests depend on: sources, compilers, packages, the seed."""
    content = hashlib.sha256(str(SEED).encode())
    for source in sources:
        path = root / source
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file() and "__pycache__" not in file.parts:
                content.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes() + b"\0")
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    places = [*(f"{home}/bin" for home in homes if home), None, "/usr/local/cuda/bin"]
    for compiler in COMPILERS:
        path_of_it = next(
            filter(None, (shutil.which(compiler, path=folder) for folder in places)), None
        )
        if path_of_it:
            process = subprocess.run([path_of_it, "--version"], capture_output=True, check=False)
            content.update(process.stdout)
    for package in PACKAGES:
        try:
            content.update(version(package).encode())
        except PackageNotFoundError:
            content.update(b"-")
    return content.hexdigest()


class Unchanged:
    """Leaves out what has passed with the digest of now, and keeps for the next run what passes.

    Attributes:
        passed: node ids.
    """

    def __init__(self, cache: pytest.Cache, now: str, always: bool = False) -> None:
        self._cache, self._now, self._always = cache, now, always
        then = cache.get(PASSED, {})
        self.passed: set[str] = set(then.get("tests", ())) if then.get("digest") == now else set()

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Deselect what cannot do otherwise than pass."""
        passed = () if self._always else self.passed
        unchanged = [
            item for item in items if item.get_closest_marker("csrc") and item.nodeid in passed
        ]
        config.hook.pytest_deselected(items=unchanged)
        items[:] = [item for item in items if item not in unchanged]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note one phase of a test."""
        if "csrc" not in report.keywords:
            return
        if report.when == "call" and report.passed:
            self.passed.add(report.nodeid)
        elif not report.passed:  # its teardown comes after the call
            self.passed.discard(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Keep it; a worker of xdist has heard of its own tests only, a soak has another seed."""
        if SEED == FIXED and not hasattr(session.config, "workerinput"):
            self._cache.set(PASSED, {"digest": self._now, "tests": sorted(self.passed)})


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add one flag."""
    parser.addoption(
        "--csrc", action="store_true", help="run the tests of compiled code, changed or not"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Look what has passed; a run without pytest's cache runs everything."""
    if config.pluginmanager.hasplugin("cacheprovider"):
        config.pluginmanager.register(
            Unchanged(config.cache, digest(), config.getoption("--csrc")), "unchanged"
        )
