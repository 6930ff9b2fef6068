"""Fast greedy against exhaustive greedy, on landscapes that it has not been tuned on."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.search_landscape import SyntheticEvaluator
from sglang_indexcache.search.ledger import Ledger, Step
from sglang_indexcache.search.methods.fast import (
    Descent,
    Fast,
    FastGreedy,
    first_subset,
    least_subset,
)
from sglang_indexcache.search.options import Options
from sglang_indexcache.search.run import Search
from tests.search.helpers import free, greedy, landscape, targets

LAYERS = 47
MARKS = ("1/2", "1/4", "1/8")


@pytest.mark.parametrize("seed", range(100, 112))
@pytest.mark.parametrize("noise", [0.1, 0.2])
def test_is_never_worse_than_exhaustive_for_a_tenth(seed: int, noise: float) -> None:
    evaluator = SyntheticEvaluator(LAYERS, 32, seed, noise=noise)
    goal = targets(LAYERS, *MARKS)
    exhaustive = Ledger(evaluator)
    path = {len(s.pattern.full_layers): s for s in greedy(exhaustive, free(LAYERS), goal)}
    search = Search(Ledger(evaluator), free(LAYERS), goal, Options())
    for _ in search.run():
        pass
    assert search.search_tokens <= exhaustive.spent / 10
    assert list(search.found) == [24, 12, 6]
    for count, found in search.found.items():
        assert found.loss == exhaustive.mean(found.pattern)
        assert found.loss <= path[count].loss
        assert found.gained == found.searched_loss - found.loss >= 0


@settings(deadline=None, max_examples=20)
@given(count=st.integers(2, 12), seed=st.integers(0, 10**6), data=st.data())
def test_exact_is_exhaustive_flip_by_flip(count: int, seed: int, data: st.DataObject) -> None:
    goal = targets(count, str(data.draw(st.integers(1, count))))
    expected = [s.pattern for s in greedy(landscape(count, seed), free(count), goal)]
    fast = FastGreedy(landscape(count, seed), Descent(free(count), goal), 0, exact=True)
    assert [step.pattern for step in fast.steps()] == expected
    paid = Fast().descend(landscape(count, seed), free(count), goal, budget=10**9)
    assert [step.pattern for step in paid] == expected


def descend(ledger: Ledger, count: int, goal: str, budget: int | None = None) -> list[Step]:
    """With the least budget, or this one."""
    way = Descent(free(count), targets(count, goal))
    least = way.least(ledger.tokens_of_batches)
    return list(FastGreedy(ledger, way, least if budget is None else budget).steps())


def test_the_least_budget_is_enough_and_more_is_used() -> None:
    ledger = landscape(LAYERS, 1, batches=32)
    assert len(descend(ledger, LAYERS, "1/8")) == 42
    least = Fast().least(free(LAYERS), targets(LAYERS, "1/8"), ledger.tokens_of_batches)
    assert ledger.spent <= least
    larger = landscape(LAYERS, 1, batches=32)
    assert len(descend(larger, LAYERS, "1/8", 2 * least)) == 42
    assert least < larger.spent <= 2 * least


def test_measures_more_again_where_old_measurements_mislead() -> None:
    """Losses without any structure: what was measured before says nothing about now."""

    class Chaos(SyntheticEvaluator):
        def _damage(self, pattern, chosen):  # type: ignore[no-untyped-def]
            import hashlib

            import numpy as np

            digest = hashlib.sha256(str(pattern).encode()).digest()
            return np.full(len(chosen), int.from_bytes(digest[:4], "big") / 2**32)

    steps = descend(Ledger(Chaos(24, 8)), 24, "1/4", 10**9)
    tame = descend(landscape(24), 24, "1/4", 10**9)

    def share(steps) -> float:  # type: ignore[no-untyped-def]
        looked = [
            s.candidates / len(b.pattern.full_layers[1:]) for b, s in itertools.pairwise(steps)
        ]
        return sum(looked[5:]) / len(looked[5:])

    assert share(steps) > 1.5 * share(tame)


def test_says_where_the_budget_left_it_undecided() -> None:
    poor = descend(landscape(24, noise=1.0), 24, "1/4")
    rich = descend(landscape(24, noise=1.0), 24, "1/4", 10**9)
    assert not all(step.decided for step in poor)
    assert all(step.decided for step in rich)


@pytest.mark.parametrize(("batches", "least"), [(1, 1), (2, 2), (8, 2), (32, 2), (64, 4)])
def test_first_subset(batches: int, least: int) -> None:
    tokens = [1000] * batches
    assert least_subset(batches) == least
    assert first_subset(tokens, 200, 0) == least
    assert first_subset(tokens, 200, 10**9) == batches
    assert first_subset([10] * 50 + [1000] * 50, 200, 200 * 2600) == 52
