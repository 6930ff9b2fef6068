import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_indexcache.errors import SearchError
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.evaluators import BatchLosses
from sglang_indexcache.search.ledger import Ledger
from sglang_indexcache.search.methods import Method
from sglang_indexcache.search.methods.fast import Fast
from sglang_indexcache.search.methods.greedy import Greedy, evaluations
from sglang_indexcache.search.rules import Constraints, parse_targets
from tests.search.helpers import free, greedy, landscape, targets
from tests.search.oracle import algorithm_1


@settings(deadline=None, max_examples=25)
@given(count=st.integers(2, 11), seed=st.integers(0, 10**6), data=st.data())
def test_is_algorithm_1_flip_by_flip(count: int, seed: int, data: st.DataObject) -> None:
    full = data.draw(st.integers(1, count))
    ledger, other = landscape(count, seed), landscape(count, seed)
    steps = greedy(ledger, free(count), targets(count, str(full)))
    expected = algorithm_1(count, lambda text: other.mean(Pattern(text)), count - full)
    assert [str(step.pattern) for step in steps[1:]] == expected
    for before, step in itertools.pairwise(steps):
        assert before.pattern.diff(step.pattern).became_shared == (step.layer,)
        assert step.loss == other.mean(step.pattern)


@pytest.mark.parametrize("full", ["12", "6", "3"])
def test_costs_what_the_model_says(full: str) -> None:
    ledger, rules, goal = landscape(12), free(12), targets(12, full)
    greedy(ledger, rules, goal)
    assert ledger.spent == evaluations(rules, goal) * ledger.full_evaluation


def test_a_whole_descent_takes_the_papers_count() -> None:
    """N(N-1)/2 forward passes, and one for the start."""
    assert evaluations(free(47), targets(47, "1")) == 47 * 46 // 2 + 1


def test_obeys_every_constraint() -> None:
    own = Pattern("FFSFFSFSFFFF")
    rules = Constraints.make(own, keep_full=[4, 6])
    for step in greedy(landscape(12), rules, parse_targets(["3"], rules)):
        text = str(step.pattern)
        assert text[0] == text[4] == text[6] == "F"
        assert text[2] == text[5] == text[7] == "S"
    assert text == "FSSSFSFSSSSS"


class Blind:
    """An evaluator whose context is too short: every pattern loses the same."""

    kind, in_flight, num_layers, batch_tokens = "blind", 1, 6, (1, 1, 1, 1)

    def loss(self, pattern: Pattern, batches: Sequence[int]) -> BatchLosses:
        return BatchLosses(np.arange(4.0)[list(batches)], 1)


@pytest.mark.parametrize("method", [Greedy(), Fast()])
def test_a_tie_of_all_candidates_is_no_pattern(method: Method) -> None:
    goal = targets(6, "2")
    steps = method.descend(Ledger(Blind()), free(6), goal, budget=10**6)
    with pytest.raises(SearchError, match="cannot tell patterns apart: 5 candidates"):
        list(steps)


def test_a_loss_that_is_no_number_ends_the_search_and_names_the_batch() -> None:
    class Broken(Blind):
        def loss(self, pattern: Pattern, batches: Sequence[int]) -> BatchLosses:
            values = np.ones(4)
            values[2] = np.nan if pattern.shared_layers else 1.0
            return BatchLosses(values[list(batches)], 1)

    steps = Greedy().descend(Ledger(Broken()), free(6), targets(6, "2"), budget=10**6)
    with pytest.raises(SearchError, match="under FSFFFF the loss on batch 2 is nan"):
        list(steps)
