"""Stand-ins of tests for a running model."""

from __future__ import annotations

from typing import Any

from sglang_indexcache.serving.process import ServingProcess
from sglang_indexcache.serving.protocol import RankState
from tests.serving.plans import plan


def state(pattern: str = "FSFS", mode: str = "static", **fields: Any) -> RankState:
    """Return what the serving code reports of a rank under ``pattern``, but for ``fields``."""
    return ServingProcess(plan(pattern, mode=mode)).report().model_copy(update=fields)
