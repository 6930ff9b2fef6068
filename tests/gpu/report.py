"""JSON of what the GPU tests found, written after each: a kernel that faults ends the process.

    python -m pytest -p tests.gpu.report --gpu-report FILE -m gpu tests/gpu

``benchmarks.card.phases`` runs each file so, and each test of servers, as a step with a limit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglang_indexcache.library.writing import write_json

TESTS = pytest.StashKey[dict[str, Any]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option for the file."""
    parser.getgroup("gpu").addoption("--gpu-report", type=Path, required=True, help="to write")


def pytest_configure(config: pytest.Config) -> None:
    """Begin with no outcome."""
    config.stash[TESTS] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Write down the outcome, and what the test measured."""
    outcome = yield
    if outcome.when == "call" or not outcome.passed:
        why = outcome.longreprtext[-2000:] if outcome.failed else ""
        why = str(outcome.longrepr[2]) if outcome.skipped else why  # type: ignore[index]
        item.config.stash[TESTS][item.nodeid] = {
            "outcome": outcome.outcome,
            "why": why,
            "seconds": round(outcome.duration, 2),
            "evidence": getattr(item, "gpu_evidence", {}),
        }
        write_json(item.config.getoption("--gpu-report"), {"tests": item.config.stash[TESTS]})
    return outcome
