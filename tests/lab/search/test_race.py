"""A race says on how many batches its winner was measured, wherever the allowance ends."""

from __future__ import annotations

import pytest

from sglang_indexcache.lab.search.race import race
from sglang_indexcache.pattern import Pattern
from tests.lab.search.helpers import landscape


@pytest.mark.parametrize(("batches", "first"), [(16, 3), (12, 2), (8, 2), (5, 1)])
def test_the_batches_of_a_finish_are_those_that_were_measured(batches: int, first: int) -> None:
    contenders = [Pattern.from_layers(6, {0, 1, 2, 3, 4, 5} - {layer}) for layer in (1, 2, 3, 4)]
    for allowance in range(0, 40_000, 1_000):
        ledger = landscape(6, batches=batches, noise=20.0)
        finish = race(ledger, contenders, first, allowance)
        measured = {
            pattern: sum((pattern, batch) in ledger._losses for batch in range(batches))
            for pattern in contenders
        }
        assert finish.batches == measured[finish.winner]
