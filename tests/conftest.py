"""What holds for all tests: where their random numbers come from, what they see, what they need.

Which tests need what a small installation lacks is said here alone; there they are skipped.
Whoever is not listed must pass without it: ``make test-fast`` shows an import that fails.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.seeds import FIXED, SEED, VARIABLE, seed_all

pytest_plugins = ("tests.unchanged",)
TESTS = Path(__file__).parent
NEEDS = {
    "sglang": (
        "e2e",
        "rehearsal/test_server.py",
        "kernels/test_references.py",
        "serving/cpu/test_fp8.py",
        "serving/cpu/test_indexer.py",
        "serving/cpu/test_window.py",
        "serving/cuda/test_backend.py",
        "serving/cuda/test_capture.py",
        "serving/cuda/test_kernels.py",
        "serving/preflight/test_config_check.py",
        "serving/preflight/test_refusals.py",
        "serving/test_adapter.py",
        "serving/test_agreement.py",
        "serving/test_handshake.py",
        "serving/test_hooks.py",
        "serving/test_live.py",
        "serving/test_plugin.py",
        "serving/test_requests.py",
        "serving/test_seams.py",
        "serving/test_settings.py",
    ),
    # It is for Linux only.
    "triton": (
        "kernels/test_triton.py",
        "kernels/test_triton_compiles.py",
    ),
}


# Hypothesis follows each test's own source, or in a soak the seed of --hypothesis-seed.
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None)
hypothesis.settings.register_profile("soak", database=None, print_blob=True)
hypothesis.settings.load_profile("fixed" if SEED == FIXED else "soak")


def wants_card(marks: str) -> bool:
    """Whether a run with ``-m marks`` is of the GPU tests."""
    return re.search(r"(?<!not )\bgpu\b", marks) is not None


def pytest_configure(config: pytest.Config) -> None:
    """Hide a card from all other tests: they are for the CPU platform, also where a card is."""
    if not wants_card(config.option.markexpr):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_report_header() -> str:
    """Say how the run's draws can be had again."""
    return f"draws: {VARIABLE}={SEED}" + (" (fixed)" if SEED == FIXED else "")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Seed before the fixtures, which draw too."""
    seed_all()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what ``make soak`` repeats: tests of hypothesis, and those that take a seed."""
    for item in items:
        drawn = hypothesis.is_hypothesis_test(getattr(item, "obj", None))
        if drawn or "seed" in getattr(item, "fixturenames", ()):
            item.add_marker("draws")


@pytest.fixture(scope="module", autouse=True)
def no_card_left_behind() -> Iterator[None]:
    """No file of tests lets the next one believe in a GPU that only it had made up."""
    yield
    if torch := sys.modules.get("torch"):
        assert torch.cuda.is_available.__module__ == torch.cuda.__name__


@pytest.fixture
def seed() -> int:
    """The run's seed; whoever takes it is repeated by ``make soak`` with others."""
    return SEED


class SkippedModule(pytest.Module):
    """A test file that is not even imported."""

    missing = ""

    def collect(self) -> Iterator[pytest.Item]:
        raise pytest.skip.Exception(
            f"{self.missing} is missing: pip install 'sglang-indexcache[serve]'",
            allow_module_level=True,
        )


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> Any:
    """Stand in for a module that needs a package which is not there."""
    for package, places in NEEDS.items():
        needed = any(module_path.is_relative_to(TESTS / place) for place in places)
        if needed and find_spec(package) is None:
            module = SkippedModule.from_parent(parent, path=module_path)
            module.missing = package
            return module
    return None
