"""Ours beside what SGLang runs by default, in the same seconds, with the card's clocks.

The last test writes what may be concluded: where ours beat all that the engine can run. Speed is no
reason for a test to fail; that nothing was timed is.
"""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.kernels.speed import conclude, measure
from benchmarks.kernels.workloads import Workload, workloads
from sglang_indexcache.kernels.dispatch import Machine

pytestmark = [pytest.mark.hopper, pytest.mark.limit(90)]
WORKLOADS = {str(work): work for work in workloads()}


@pytest.mark.parametrize("work", WORKLOADS.values(), ids=WORKLOADS)
def test_times(work: Workload, evidence: dict[str, Any]) -> None:
    evidence |= measure(work, Machine.here())
    assert evidence["times"], evidence["missing"]


def test_what_may_become_a_default(reported: dict[str, Any]) -> None:
    found = {
        name.partition("test_times[")[2].removesuffix("]"): result["evidence"]
        for name, result in reported["tests"].items()
        if "test_times[" in name and result.get("evidence", {}).get("times")
    }
    assert found, "nothing was timed"
    reported["faster"] = conclude(found, reported["machine"]["name"])
