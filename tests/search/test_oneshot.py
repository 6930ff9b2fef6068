"""One-shot sensitivities against plain loops, and what refinement makes of them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_indexcache.errors import SearchError
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.constraints import Constraints
from sglang_indexcache.search.methods.oneshot import OneShot
from sglang_indexcache.search.options import Options
from sglang_indexcache.search.refinements.exchange import Swap
from sglang_indexcache.search.run import Search
from sglang_indexcache.search.targets import parse_targets
from tests.search.helpers import free, landscape, targets
from tests.search.oracle import every_pattern


@settings(deadline=None, max_examples=25)
@given(count=st.integers(2, 12), seed=st.integers(0, 10**6), data=st.data())
def test_shares_what_costs_least_alone(count: int, seed: int, data: st.DataObject) -> None:
    full = data.draw(st.integers(1, count))
    other = landscape(count, seed)
    singles = {
        layer: other.mean(Pattern("F" * layer + "S" + "F" * (count - layer - 1)))
        for layer in range(1, count)
    }
    shared = sorted(singles, key=lambda layer: singles[layer])[: count - full]
    expected = "".join("S" if layer in shared else "F" for layer in range(count))
    ledger = landscape(count, seed)
    _, pattern = OneShot().descend(ledger, free(count), targets(count, str(full)), 10**9)
    assert str(pattern) == expected


def test_obeys_every_constraint() -> None:
    own = Pattern("FFSFFSFFFFFF")
    rules = Constraints.make(own, keep_full=[4], force_shared=[7], stage_starts=[6])
    goal = parse_targets(["3", "7"], rules)
    _, *found = OneShot().descend(landscape(12), rules, goal, 10**9)
    texts = [str(pattern) for pattern in found]
    assert [text.count("F") for text in texts] == [7, 3]
    for text in texts:
        assert text[0] == text[4] == text[6] == "F"
        assert text[2] == text[5] == text[7] == "S"


@pytest.mark.parametrize("batches", [1, 2, 8, 33])
def test_the_least_budget_is_enough(batches: int) -> None:
    goal = targets(24, "24", "23", "1/2")
    ledger = landscape(24, 2, batches=batches)
    least = OneShot().least(free(24), goal, ledger.tokens_of_batches)
    for pattern in list(OneShot().descend(ledger, free(24), goal, least))[1:]:
        assert isinstance(pattern, Pattern)
        ledger.losses(pattern)
    assert ledger.spent <= least


def test_refinement_repairs_what_it_is_blind_to() -> None:
    gained = 0
    for seed in range(10):
        search = Search(landscape(10, seed), free(10), targets(10, "4"), Options(OneShot(), Swap()))
        for _ in search.run():
            pass
        [found] = search.found.values()
        best = min(search.ledger.mean(Pattern(text)) for text in every_pattern(10, 4))
        assert best <= found.loss <= found.searched_loss
        gained += found.loss < found.searched_loss
    assert gained > 0


def test_refuses_a_loss_budget() -> None:
    with pytest.raises(SearchError, match=r"one-shot sensitivities cannot stop at a loss budget"):
        Search(landscape(12), free(12), targets(12, "1/2", "+1%"), Options(OneShot()))
