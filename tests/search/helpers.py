"""Shared by the tests of the search package."""

from __future__ import annotations

from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.constraints import Constraints
from sglang_indexcache.search.evaluators.synthetic import SyntheticEvaluator
from sglang_indexcache.search.ledger import Ledger
from sglang_indexcache.search.targets import Targets, parse_targets


def free(count: int) -> Constraints:
    """No rule but layer 0."""
    return Constraints.make(Pattern.full(count))


def targets(count: int, *values: str) -> Targets:
    return parse_targets(values, free(count))


def landscape(count: int, seed: int = 0, batches: int = 8, **arguments: float) -> Ledger:
    return Ledger(SyntheticEvaluator(count, batches, seed, **arguments))  # type: ignore[arg-type]
