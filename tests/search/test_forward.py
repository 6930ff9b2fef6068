"""Forward selection against plain loops, and what it keeps to."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.ledger import Step
from sglang_indexcache.search.methods.fast import FastGreedy
from sglang_indexcache.search.methods.forward import Ascent, Forward
from sglang_indexcache.search.options import Options
from sglang_indexcache.search.rules import Constraints, parse_targets
from sglang_indexcache.search.run import Search
from tests.search.helpers import free, landscape, targets
from tests.search.oracle import forward_selection


def oracle(count: int, seed: int, full: int, **arguments: float) -> list[str]:
    other = landscape(count, seed, **arguments)
    return forward_selection(count, lambda text: other.mean(Pattern(text)), full - 1)


def walked(events: list[Step | Pattern]) -> list[str]:
    return [str(event.pattern) for event in events[1:] if isinstance(event, Step)]


@settings(deadline=None, max_examples=25)
@given(count=st.integers(2, 11), seed=st.integers(0, 10**6), data=st.data())
def test_with_every_measurement_it_is_forward_selection(
    count: int, seed: int, data: st.DataObject
) -> None:
    full = data.draw(st.integers(1, count))
    way = Ascent(free(count), targets(count, str(full)))
    steps = list(FastGreedy(landscape(count, seed), way, 0, exact=True).steps())
    assert walked([*steps]) == oracle(count, seed, full)


@settings(deadline=None, max_examples=25)
@given(count=st.integers(2, 14), seed=st.integers(0, 10**6), data=st.data())
def test_lazy_looks_lose_nothing_where_gains_only_shrink(
    count: int, seed: int, data: st.DataObject
) -> None:
    """Without coupling they do: each layer's loss depends on its nearest F layer alone."""
    full = data.draw(st.integers(1, count))
    ledger = landscape(count, seed, coupling=0.0)
    events = list(Forward().descend(ledger, free(count), targets(count, str(full)), 10**9))
    assert walked(events) == oracle(count, seed, full, coupling=0.0)


def test_looks_at_few_of_many_candidates() -> None:
    ledger = landscape(47, 1, coupling=0.0)
    events = list(Forward().descend(ledger, free(47), targets(47, "1/4"), 10**9))
    steps = [event for event in events[2:] if isinstance(event, Step)]
    assert sum(step.candidates for step in steps) < 0.5 * sum(46 - n for n in range(1, 12))


def test_leaves_every_mark_and_the_marks_are_listed_from_most_f_layers() -> None:
    goal = targets(12, "1", "1/4", "1/2")
    search = Search(landscape(12), free(12), goal, Options(Forward()))
    for _ in search.run():
        pass
    assert list(search.found) == [6, 3, 1]
    assert str(search.found[1].pattern) == "FSSSSSSSSSSS"
    assert all(found.is_final for found in search.found.values())
    counts = [len(step.pattern.full_layers) for step in search.path]
    assert counts == [12, *range(2, 7)]
    for before, step in itertools.pairwise(search.path[1:]):
        assert before.pattern.diff(step.pattern).became_full == (step.layer,)


def test_obeys_every_constraint() -> None:
    own = Pattern("FFSFFSFSFFFF")
    rules = Constraints.make(own, keep_full=[4, 6])
    events = list(Forward().descend(landscape(12), rules, parse_targets(["7"], rules), 10**9))
    for text in walked(events):
        assert text[0] == text[4] == text[6] == "F"
        assert text[2] == text[5] == text[7] == "S"
    assert len(walked(events)) == 4


@pytest.mark.parametrize("batches", [1, 2, 8, 33])
def test_the_least_budget_is_enough(batches: int) -> None:
    goal = targets(24, "1", "1/2")
    ledger = landscape(24, 2, batches=batches)
    least = Forward().least(free(24), goal, ledger.tokens_of_batches)
    for event in Forward().descend(ledger, free(24), goal, least):
        pattern = event.pattern if isinstance(event, Step) else event
        if goal.mark_at(len(pattern.full_layers)):
            ledger.losses(pattern)
    assert ledger.spent <= least
    assert len(pattern.full_layers) == 12
