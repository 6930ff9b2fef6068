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
from sglang_indexcache.search.methods.greedy import Greedy, evaluations, greedy
from sglang_indexcache.search.rules import Constraints, parse_targets, stage_starts
from tests.search.helpers import free, landscape, targets
from tests.search.oracle import algorithm_1, algorithm_1_in_blocks


@settings(deadline=None, max_examples=25)
@given(count=st.integers(2, 11), seed=st.integers(0, 10**6), data=st.data())
def test_is_algorithm_1_flip_by_flip(count: int, seed: int, data: st.DataObject) -> None:
    full = data.draw(st.integers(1, count))
    ledger, other = landscape(count, seed), landscape(count, seed)
    steps = list(greedy(ledger, free(count), targets(count, str(full))))
    expected = algorithm_1(count, lambda text: other.mean(Pattern(text)), count - full)
    assert [str(step.pattern) for step in steps[1:]] == expected
    for before, step in itertools.pairwise(steps):
        assert before.pattern.diff(step.pattern).became_shared == (step.layer,)
        assert step.loss == other.mean(step.pattern)


@settings(deadline=None, max_examples=25)
@given(count=st.integers(4, 13), blocks=st.integers(2, 4), seed=st.integers(0, 10**6))
def test_blocks_commit_one_after_the_other(count: int, blocks: int, seed: int) -> None:
    ledger, other = landscape(count, seed), landscape(count, seed)
    starts = [*stage_starts(count, blocks), count]
    cut = [list(range(a, b)) for a, b in itertools.pairwise(starts)]
    steps = list(greedy(ledger, free(count), targets(count, str(blocks)), blocks))
    expected = algorithm_1_in_blocks(cut, lambda text: other.mean(Pattern(text)), count)
    assert [str(step.pattern) for step in steps[1:]] == expected
    assert str(steps[-1].pattern).count("F") == blocks


def test_blocks_stop_at_the_target_in_the_middle_of_a_round() -> None:
    steps = list(greedy(landscape(12), free(12), targets(12, "7"), blocks=3))
    assert [len(step.pattern.full_layers) for step in steps] == [12, 11, 10, 9, 8, 7]


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("full", ["12", "6", "3"])
def test_costs_what_the_model_says(blocks: int, full: str) -> None:
    ledger, rules, goal = landscape(12), free(12), targets(12, full)
    list(greedy(ledger, rules, goal, blocks))
    assert ledger.spent == evaluations(rules, goal, blocks) * ledger.full_evaluation


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


def test_ends_within_the_loss_budget() -> None:
    ledger = landscape(16, 3)
    steps = list(greedy(ledger, free(16), targets(16, "+1%")))
    limit = steps[0].loss * 1.01
    assert all(step.loss <= limit for step in steps)
    further = list(greedy(ledger, free(16), targets(16, "1")))[len(steps)]
    assert further.loss > limit


def test_more_blocks_than_layers() -> None:
    with pytest.raises(SearchError, match="4 layers cannot be cut into 5 blocks"):
        list(greedy(landscape(4), free(4), targets(4, "1"), blocks=5))


def test_a_target_below_what_blocks_keep_is_refused() -> None:
    """It was left out of the result without a word."""
    with pytest.raises(SearchError, match="3 F layers are the fewest, and not 2"):
        Greedy(3).least(free(12), targets(12, "2"), [1])


class Blind:
    """An evaluator whose context is too short: every pattern loses the same."""

    in_flight, num_layers, batch_tokens = 1, 6, (1, 1, 1, 1)

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
