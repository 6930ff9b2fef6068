"""A search of a made-up landscape that leaves time to interrupt it.

``python -m tests.lab.search.slow_search OUTPUT``: as a command that a signal interrupts.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from sglang_indexcache.lab.search.evaluators import Floats
from sglang_indexcache.lab.search.judged import Judged
from sglang_indexcache.pattern import Pattern
from tests.fixtures.landscape import SeenEvaluator
from tests.lab.search.helpers import searched

SECONDS = 0.02


class Slow(SeenEvaluator):
    """Takes its time for every call."""

    def loss(self, pattern: Pattern, batches: Sequence[int]) -> Floats:
        time.sleep(SECONDS)
        return super().loss(pattern, batches)

    def judge(self, pattern: Pattern, batches: Sequence[int]) -> list[Judged]:
        time.sleep(SECONDS)
        return super().judge(pattern, batches)

    def kept_mass(self, batch: int) -> Floats:
        time.sleep(SECONDS)
        return super().kept_mass(batch)


def search(output: Path, method: str, calls: int) -> None:
    """Search with so many calls at the same time."""
    evaluator = Slow(12, 16)
    evaluator.in_flight = calls
    searched(output, evaluator, held_out=8, method=method)


if __name__ == "__main__":
    try:
        search(Path(sys.argv[1]), "greedy", 1)
    except KeyboardInterrupt:
        sys.exit(130)
