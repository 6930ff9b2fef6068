import re
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from sglang_indexcache.errors import SearchError
from sglang_indexcache.lab.search.ledger import Ledger
from sglang_indexcache.lab.search.methods import METHODS, METHODS_IN_PROCESS
from sglang_indexcache.lab.search.methods.greedy import Greedy
from sglang_indexcache.lab.search.options import Options
from sglang_indexcache.lab.search.rules import Constraints, Targets, parse_targets
from sglang_indexcache.lab.search.run import Search
from sglang_indexcache.pattern import Pattern
from tests.fixtures.landscape import SeenEvaluator
from tests.lab.search.helpers import finished, landscape, targets


def test_the_papers_search() -> None:
    """47 layers down to one: N(N-1)/2 passes over 768 sequences of 200K, and the start."""
    tokens = [200_000] * 768
    budget = Options(Greedy(), refine=False).budget(targets(47, "1"), tokens)
    assert budget.total == budget.exhaustive == (47 * 46 // 2 + 1) * 768 * 200_000


@pytest.mark.parametrize("seed", range(4))
def test_greedy_is_refined_too_and_its_bill_says_so(seed: int) -> None:
    """It spends more than the budget itself, which once left nothing for the refinement."""
    goal = targets(24, "1/4")
    plain, refined = (
        finished(landscape(24, seed, batches=16), goal, Options(Greedy(), refine=refine))
        for refine in (False, True)
    )
    for search in (plain, refined):
        assert search.search_tokens <= search.expected_tokens
    assert refined.search_tokens > plain.search_tokens
    [before], [after] = plain.found.values(), refined.found.values()
    assert after.loss <= before.loss
    assert (after.exchanges > 0) == (after.loss < before.loss)


# -- budgets -----------------------------------------------------------------------------------


@st.composite
def searches(draw: st.DrawFn) -> tuple[Ledger, Targets, Options]:
    layers = draw(st.sampled_from([4, 5, 8, 12, 20, 47, 80]))
    batches = draw(st.sampled_from([1, 2, 3, 8, 16, 33, 64]))
    names = ["fast", "forward", "both"]
    names += ["greedy"] if layers <= 12 else []
    method = draw(st.sampled_from(names))
    marks = draw(st.lists(st.integers(2, layers).map(str), min_size=1, max_size=3))
    keep = draw(st.sampled_from([[], [], [2], [1, 3]]))
    rules = Constraints.make(Pattern.full(layers), keep_full=keep)
    seed, noise = draw(st.integers(0, 10**6)), draw(st.sampled_from([0.1, 1.0]))
    evaluator = SeenEvaluator(layers, batches, seed, noise=noise)
    if draw(st.booleans()):  # documents are whole, so batches differ in length
        lengths = np.random.default_rng(seed).integers(1, 2000, batches)
        evaluator.batch_tokens = tuple(int(length) for length in lengths)
    refine = draw(st.booleans())
    share = draw(st.sampled_from([None, None, 0.05, 0.1, 0.3, 1.0]))
    with reject_on(SearchError):
        goal = parse_targets(marks, rules)
        methods = draw(st.sampled_from([METHODS, METHODS_IN_PROCESS]))
        options = Options.parse(method, share, refine=refine, methods=methods)
        options.budget(goal, evaluator.batch_tokens)
    return Ledger(evaluator), goal, options


@contextmanager
def reject_on(error: type[Exception]) -> Iterator[None]:
    """An input that is refused before the search says nothing about the search."""
    try:
        yield
    except error:
        reject()


@settings(deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))
@given(case=searches())
def test_no_search_forwards_more_than_was_said(
    case: tuple[Ledger, Targets, Options],
) -> None:
    ledger, goal, options = case
    search = finished(ledger, goal, options)
    assert search.search_tokens <= search.budget.total
    assert ledger.spent <= search.expected_tokens
    if not isinstance(options.method, Greedy):
        assert search.budget.total <= search.budget.exhaustive
    if options.share is not None:
        assert search.budget.total <= round(options.share * search.budget.exhaustive)
    assert set(search.found) == {mark.full_layers for mark in goal.marks}


@pytest.mark.parametrize(("layers", "least"), [(47, 0.12), (78, 0.072)])
def test_two_batches(layers: int, least: float) -> None:
    """Each look takes both: a tenth was exceeded 1.4 to 2.3 times."""
    goal = targets(layers, "1/2", "1/4", "1/8")
    with pytest.raises(SearchError, match=f"--budget 0.07 is .* needs at least {least} of exh"):
        Search(landscape(layers, batches=2), goal, Options(share=0.07))
    search = finished(landscape(layers, batches=2), goal, Options(share=least))
    assert search.search_tokens <= least * search.budget.exhaustive


@pytest.mark.parametrize("method", ["fast", "forward", "both"])
def test_the_refusal_names_a_budget_that_is_enough(method: str) -> None:
    goal, ledger = targets(24, "1/4"), landscape(24, batches=4)
    with pytest.raises(SearchError, match="needs at least") as error:
        Search(ledger, goal, Options.parse(method, share=0.001))
    enough = float(re.findall(r"at least ([\d.]+)", str(error.value))[0])
    assert finished(ledger, goal, Options.parse(method, share=enough)).is_complete
    with pytest.raises(SearchError):
        Search(ledger, goal, Options.parse(method, share=enough - 0.001))


def test_a_target_one_flip_away_costs_no_more_than_exhaustive() -> None:
    """It took two evaluations per layer, twice as much."""
    goal = targets(47, "46")
    search = finished(landscape(47, batches=16), goal)
    assert search.budget.total == search.budget.exhaustive == 47 * 16_000
    assert search.search_tokens <= search.budget.exhaustive


def test_every_budget_does_something() -> None:
    """Below 0.088 it did nothing at 47 layers."""
    goal = targets(47, "1/2", "1/4", "1/8")
    spent = []
    for share in (0.03, 0.05, 0.08, 0.2):
        search = finished(landscape(47, batches=32), goal, Options(share=share))
        spent.append(search.search_tokens / search.budget.exhaustive)
        assert spent[-1] <= share
    assert spent == sorted(spent)
    assert spent[-1] > 2 * spent[0]


def test_provenance_names_a_refinement_only_where_it_ran() -> None:
    goal = targets(12, "1/4")
    search = finished(landscape(12), goal, Options.parse("greedy", 1.0))
    assert search.budget.refinement == 0
    assert search.in_words() == "exhaustive greedy (Algorithm 1)"
    search = finished(landscape(12), goal, Options.parse("greedy"))
    assert search.in_words() == "exhaustive greedy (Algorithm 1), then screened refinement"
    words = Options.parse("fast", refine=False).in_words()
    assert words == "fast greedy (lazy re-evaluation, paired racing)"


def test_more_than_exhaustive_is_refused() -> None:
    """Upwards to nearly all F is the long way round."""
    with pytest.raises(SearchError, match="Search with --method greedy"):
        Search(landscape(24, batches=2), targets(24, "23"), Options.parse("forward"))
