"""The ``indexcache`` command with a made-up landscape that leaves time to interrupt a search.

``SERVERS`` in the environment says how many calls it takes at the same time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from sglang_indexcache.cli import app
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.evaluators import BatchLosses
from sglang_indexcache.search.evaluators.synthetic import SyntheticEvaluator

SECONDS = 0.02

measure = SyntheticEvaluator.loss


def measure_slowly(
    self: SyntheticEvaluator, pattern: Pattern, batches: Sequence[int]
) -> BatchLosses:
    time.sleep(SECONDS)
    return measure(self, pattern, batches)


if __name__ == "__main__":
    SyntheticEvaluator.loss = measure_slowly  # type: ignore[method-assign]
    SyntheticEvaluator.in_flight = int(os.environ.get("SERVERS", "1"))
    app()
