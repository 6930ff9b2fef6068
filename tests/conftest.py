"""Rules for all tests: the source of their random numbers, and what of the machine they see."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.seeds import FIXED, SEED, VARIABLE, seed_all

pytest_plugins = ("tests.unchanged", "tests.without_sglang")

# Hypothesis follows each test's own source, or in a soak the seed of --hypothesis-seed.
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None)
hypothesis.settings.register_profile("soak", database=None, print_blob=True)
hypothesis.settings.load_profile("fixed" if SEED == FIXED else "soak")


def wants_card(marks: str) -> bool:
    """Whether a run with ``-m marks`` is of the GPU tests."""
    return re.search(r"(?<!not )\bgpu\b", marks) is not None


def pytest_configure(config: pytest.Config) -> None:
    """Hide a card from all other tests: they are for the CPU platform, also where a card is.

    Two workers that each take all cores are slower than two with one thread each, by a third.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
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
        is_drawn = hypothesis.is_hypothesis_test(getattr(item, "obj", None))
        if is_drawn or "seed" in getattr(item, "fixturenames", ()):
            item.add_marker("draws")


@pytest.fixture(scope="module", autouse=True)
def no_card_left_behind() -> Iterator[None]:
    """No file of tests lets the next one believe in a GPU that only it had made up."""
    yield
    if (torch := sys.modules.get("torch")) and "INDEXCACHE_REHEARSAL" not in os.environ:
        assert torch.cuda.is_available.__module__ == torch.cuda.__name__


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Save a tiny checkpoint of each shape: 6 layers, top 64 of the visible tokens; only read it.

    Stored in float32, so that a weight which an engine rounds on its way shows.
    """
    from tests.fixtures.models import make_model

    base = tmp_path_factory.mktemp("checkpoints")
    folders = {preset: base / preset for preset in ("glm-5", "deepseek-v3.2")}
    for preset, folder in folders.items():
        make_model(folder, preset, "tiny", vocab_size=512, dtype="float32")
    return folders


@pytest.fixture
def seed() -> int:
    """Return the run's seed; whoever takes it is repeated by ``make soak`` with others."""
    return SEED
