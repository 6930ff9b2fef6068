"""Losses from running SGLangs in live mode: the engine that will serve the pattern, as it is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sglang_indexcache.ask.pool import Pool
from sglang_indexcache.ask.score import Prompt, score
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.calibration import Calibration
from sglang_indexcache.search.evaluators import BatchLosses, Floats


class ServedEvaluator:
    """Teacher-forced log-probabilities of running engines, which may serve others too.

    Each request names its pattern. All sequences of a call go out as one request, so data-parallel
    ranks work side by side. Calls may be made from ``in_flight`` threads.

    Args:
        pool: of engines. What they serve to others, and under which pattern, does not matter.
        calibration: what to measure on.
    """

    def __init__(self, pool: Pool, calibration: Calibration) -> None:
        self._pool = pool
        self.calibration = calibration
        self.batch_tokens = calibration.batch_tokens
        self.num_layers = len(pool.checkpoint[1])
        self.in_flight = pool.in_flight

    def loss(self, pattern: Pattern, batches: Sequence[int]) -> BatchLosses:
        """See :class:`~sglang_indexcache.search.evaluators.Evaluator`."""
        tokens = sum(self.batch_tokens[batch] for batch in batches)
        losses = self.token_losses(pattern, batches)
        counted = self.calibration.counted_in(batches)
        return BatchLosses.of_tokens(losses, tokens * self.num_layers, counted)

    def token_losses(self, pattern: Pattern, batches: Sequence[int]) -> list[list[Floats]]:
        """See :class:`~sglang_indexcache.search.evaluators.TokenEvaluator`."""
        cut = self.calibration.batches
        # Scored from their beginning: then no engine reads them from its cache.
        prompts = [
            Prompt(ids, str(pattern), scored=len(ids) - 1)
            for batch in batches
            for ids in cut[batch]
        ]
        scores = iter(self._pool.ask(lambda engine: score(engine, prompts)))
        return [[-np.array(next(scores).logprobs) for _ in cut[batch]] for batch in batches]
