"""The order of the GPU tests, and what each needs: without it, it is skipped with the reason."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.report import REPORT

ORDER = ("start", "served", "capture", "kernels", "speed")
"""What a user of a card wants to know first, and what everything else stands on."""
HOPPER = (9, 0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark, sort and skip what is in this folder, but for the tests of the tests themselves."""
    ours = {f"test_{name}.py": place for place, name in enumerate(ORDER)}
    here = [one for one in items if one.path.parent == Path(__file__).parent]
    here = [one for one in here if one.path.name in ours]
    for item in here:
        item.add_marker("gpu")
        if why := missing(item):
            item.add_marker(pytest.mark.skip(reason=why))
    ranked = iter(sorted(here, key=lambda one: ours[one.path.name]))
    items[:] = [next(ranked) if one in here else one for one in items]


def missing(item: pytest.Item) -> str | None:
    """The hardware or the package that a test needs and this machine lacks, in words."""
    if not torch.cuda.is_available():
        return "needs an NVIDIA GPU (H100 or H200): torch sees none"
    if item.get_closest_marker("hopper") and torch.cuda.get_device_capability() != HOPPER:
        return f"needs an H100 or H200, this is a {torch.cuda.get_device_name()}"
    if item.get_closest_marker("sglang") and find_spec("sglang") is None:
        return "needs SGLang: unpack the archive of benchmarks.card.pack"
    return None


@pytest.fixture
def evidence(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What a test found, beside its outcome; written into the report if there is one."""
    found: dict[str, Any] = {}
    request.node.gpu_evidence = found
    return found


@pytest.fixture
def reported(pytestconfig: pytest.Config) -> dict[str, Any]:
    """The report so far, earlier runs included; what is put in it is kept."""
    report = pytestconfig.stash.get(REPORT, None)
    return report.content if report else {"tests": {}, "remembered": {}}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped checkpoint in the widths that DSA's CUDA kernels are compiled for."""
    from tests.rehearsal.widened import widen

    return widen(tmp_path_factory.mktemp("served") / "model", heads=64, index_heads=32)


@pytest.fixture(scope="session")
def prompts() -> list[tuple[int, ...]]:
    """Source code that training never saw: two on which selection matters, one that fits into k."""
    from tests.rehearsal.widened import real_text

    return [tuple(real_text(start, n)) for start, n in ((0, 5000), (5000, 3001), (9000, 700))]
