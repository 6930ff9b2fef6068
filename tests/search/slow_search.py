"""A search of a made-up landscape that leaves time to interrupt it.

``python -m tests.search.slow_search OUTPUT METHOD CALLS``: so many calls at the same time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.search_landscape import SyntheticEvaluator
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.evaluators import Floats
from tests.search.helpers import searched

SECONDS = 0.02


class Slow(SyntheticEvaluator):
    """Takes its time for every call."""

    def loss(self, pattern: Pattern, batches: Sequence[int]) -> Floats:
        time.sleep(SECONDS)
        return super().loss(pattern, batches)


if __name__ == "__main__":
    output, method, calls = sys.argv[1:]
    evaluator = Slow(12, 16)
    evaluator.in_flight = int(calls)
    try:
        searched(Path(output), evaluator, held_out=8, method=method)
    except KeyboardInterrupt:
        sys.exit(130)
