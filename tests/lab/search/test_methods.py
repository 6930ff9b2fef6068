"""Patterns that each method finds, against plain loops, and rules that all of them keep."""

from __future__ import annotations

import hashlib
import io
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from sglang_indexcache.errors import SearchError
from sglang_indexcache.lab.search.evaluators import Floats
from sglang_indexcache.lab.search.ledger import Ledger, Step
from sglang_indexcache.lab.search.methods import (
    METHODS,
    METHODS_FROM_LISTS,
    METHODS_IN_PROCESS,
    Method,
)
from sglang_indexcache.lab.search.methods.fast import (
    Descent,
    FastGreedy,
    first_subset,
    least_subset,
)
from sglang_indexcache.lab.search.methods.forward import Ascent
from sglang_indexcache.lab.search.methods.greedy import evaluations
from sglang_indexcache.lab.search.options import Options
from sglang_indexcache.lab.search.rules import Constraints, Proposal, parse_targets
from sglang_indexcache.lab.search.session import _remarks, _show
from sglang_indexcache.pattern import Pattern
from tests.fixtures.landscape import SeenEvaluator, SyntheticEvaluator
from tests.lab.search.helpers import finished, greedy, landscape, searched, targets
from tests.lab.search.oracle import algorithm_1, forward_selection

BY_LOSS = ("both", "fast", "forward", "greedy")
BOTH, FAST, FORWARD, GREEDY = (METHODS[name] for name in BY_LOSS)
STARTED = METHODS_IN_PROCESS["both"]
LAYERS, PLENTY = 47, 10**9
MARKS = ("1/2", "1/4", "1/8")

# -- every method ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BY_LOSS)
def test_obeys_every_constraint(name: str) -> None:
    shipped = Pattern("FFSFFSFSFFFF")
    rules = Constraints.make(shipped, keep_full=[4, 6])
    goal = parse_targets(["7", "3"], rules)
    events = [*METHODS[name].descend(landscape(12), goal, PLENTY)]
    for text in (str(event.pattern) for event in events):
        assert text[0] == text[4] == text[6] == "F"
        assert text[2] == text[5] == text[7] == "S"
    assert len(events) == {"greedy": 7, "fast": 7, "forward": 6, "both": 13}[name]


@pytest.mark.parametrize("method", [FAST, FORWARD, BOTH, STARTED])
@pytest.mark.parametrize("batches", [1, 2, 8, 33])
def test_the_least_budget_is_enough(method: Method, batches: int) -> None:
    goal, ledger = targets(24, "1", "1/2"), Ledger(SeenEvaluator(24, batches, 2))
    least = method.least(goal, ledger.tokens_of_batches)
    counts = set()
    for event in method.descend(ledger, goal, least):
        counts.add(len(event.pattern.full_layers))
        if goal.mark_at(len(event.pattern.full_layers)):
            ledger.losses(event.pattern)
    assert ledger.spent <= least
    assert {1, 12} < counts


class Blind:
    """An evaluator whose context is too short: every pattern loses the same."""

    kind, in_flight, by_batch, num_layers = "blind", 1, False, 6
    batch_tokens = (1, 1, 1, 1)

    def loss(self, pattern: Pattern, batches: Sequence[int]) -> Floats:
        return np.arange(4.0)[list(batches)]


@pytest.mark.parametrize("method", [GREEDY, FAST])
def test_a_tie_of_all_candidates_is_no_pattern(method: Method) -> None:
    steps = method.descend(Ledger(Blind()), targets(6, "2"), budget=PLENTY)
    with pytest.raises(SearchError, match="cannot tell patterns apart: 5 candidates"):
        list(steps)


def test_a_loss_that_is_no_number_ends_the_search_and_names_the_batch() -> None:
    class Broken(Blind):
        def loss(self, pattern: Pattern, batches: Sequence[int]) -> Floats:
            values = np.ones(4)
            values[2] = np.nan if pattern.shared_layers else 1.0
            return values[list(batches)]

    with pytest.raises(SearchError, match="under FSFFFF the loss on batch 2 is nan"):
        greedy(Ledger(Broken()), targets(6, "2"))


# -- exhaustive greedy -------------------------------------------------------------------------


@settings(deadline=None, max_examples=25)
@given(count=st.integers(2, 11), seed=st.integers(0, 10**6), data=st.data())
def test_greedy_is_algorithm_1_flip_by_flip(count: int, seed: int, data: st.DataObject) -> None:
    full = data.draw(st.integers(1, count))
    goal = targets(count, str(full))
    ledger, again = landscape(count, seed), landscape(count, seed)
    steps = greedy(ledger, goal)
    expected = algorithm_1(count, lambda text: again.mean(Pattern(text)), count - full)
    assert [str(step.pattern) for step in steps[1:]] == expected
    for before, step in itertools.pairwise(steps):
        assert set(before.pattern.full_layers) - set(step.pattern.full_layers) == {step.layer}
        assert step.loss == again.mean(step.pattern)
    assert ledger.spent == evaluations(goal) * ledger.full_evaluation


# -- fast --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(100, 112))
@pytest.mark.parametrize("noise", [0.1, 0.2])
def test_fast_is_never_worse_than_exhaustive_for_a_tenth(seed: int, noise: float) -> None:
    """The landscapes are ones that it has not been tuned on."""
    evaluator = SyntheticEvaluator(LAYERS, 32, seed, noise=noise)
    goal = targets(LAYERS, *MARKS)
    exhaustive = Ledger(evaluator)
    path = {len(s.pattern.full_layers): s for s in greedy(exhaustive, goal)}
    search = finished(Ledger(evaluator), goal)
    assert search.search_tokens <= exhaustive.spent / 10
    assert list(search.found) == [24, 12, 6]
    for count, choice in search.found.items():
        assert choice.loss == exhaustive.mean(choice.pattern)
        assert choice.loss <= path[count].loss
        assert choice.loss <= choice.searched_loss


@settings(deadline=None, max_examples=20)
@given(count=st.integers(2, 12), seed=st.integers(0, 10**6), data=st.data())
def test_exact_is_exhaustive_flip_by_flip(count: int, seed: int, data: st.DataObject) -> None:
    goal = targets(count, str(data.draw(st.integers(1, count))))
    expected = [s.pattern for s in greedy(landscape(count, seed), goal)]
    fast = FastGreedy(landscape(count, seed), Descent(goal), 0, exact=True)
    assert [step.pattern for step in fast.steps()] == expected
    paid = FAST.descend(landscape(count, seed), goal, budget=PLENTY)
    assert [step.pattern for step in paid] == expected


def descend(ledger: Ledger, count: int, goal: str, budget: int | None = None) -> list[Step]:
    """Descend with the least budget, or this one."""
    descent = Descent(targets(count, goal))
    least = descent.least(ledger.tokens_of_batches)
    return list(FastGreedy(ledger, descent, least if budget is None else budget).steps())


def test_measures_more_again_where_old_measurements_mislead() -> None:
    """Losses without any structure: what was measured before says nothing about now."""

    class Chaos(SyntheticEvaluator):
        def _damage(self, pattern: Pattern, batches: np.ndarray) -> Floats:
            digest = hashlib.sha256(str(pattern).encode()).digest()
            return np.full(len(batches), int.from_bytes(digest[:4], "big") / 2**32)

    def share(ledger: Ledger) -> float:
        steps = descend(ledger, 24, "1/4", PLENTY)
        looked = [
            s.candidates / len(b.pattern.full_layers[1:]) for b, s in itertools.pairwise(steps)
        ]
        return sum(looked[5:]) / len(looked[5:])

    assert share(Ledger(Chaos(24, 8))) > 1.5 * share(landscape(24))


def test_says_where_the_budget_left_it_undecided() -> None:
    poor = descend(landscape(24, noise=1.0), 24, "1/4")
    rich = descend(landscape(24, noise=1.0), 24, "1/4", PLENTY)
    assert not all(step.decided for step in poor)
    assert all(step.decided for step in rich)


def test_a_search_of_few_layers_says_what_would_decide_its_flips() -> None:
    """One word at each flip, and at the end what it means and what to do."""
    search = finished(landscape(8, noise=1.0), targets(8, "1/4"), Options.parse("both"))
    undecided = [step for step in search.path if not step.decided]
    assert undecided
    console = Console(file=io.StringIO(), width=200)
    _show(undecided[0], search, console, "")
    assert console.file.getvalue().endswith(" batches, undecided)\n")  # type: ignore[attr-defined]
    remarks = " ".join(_remarks(search, "loss"))
    assert f"{len(undecided)} of " in remarks
    share = search.search_tokens / search.budget.exhaustive
    assert share > 0.5
    assert "--method greedy, which measures every candidate on every batch" in remarks
    assert f"{1 / share:.1f} times the tokens" in remarks


@pytest.mark.parametrize(("batches", "least"), [(1, 1), (2, 2), (8, 2), (32, 2), (64, 4)])
def test_first_subset(batches: int, least: int) -> None:
    tokens = [1000] * batches
    assert least_subset(batches) == least
    assert first_subset(tokens, 200, 0) == least
    assert first_subset(tokens, 200, PLENTY) == batches
    assert first_subset([10] * 50 + [1000] * 50, 200, 200 * 2600) == 52


# -- forward -----------------------------------------------------------------------------------


def walked(events: Sequence[Step | Proposal]) -> list[str]:
    return [str(event.pattern) for event in events[1:] if isinstance(event, Step)]


@pytest.mark.parametrize("lazy", [False, True])
@settings(deadline=None, max_examples=25)
@given(count=st.integers(2, 12), seed=st.integers(0, 10**6), data=st.data())
def test_forward_is_forward_selection(
    lazy: bool, count: int, seed: int, data: st.DataObject
) -> None:
    """It is so with every measurement, and with lazy looks where gains only shrink: no coupling."""
    goal = targets(count, str(full := data.draw(st.integers(1, count))))
    ledger, again = (landscape(count, seed, coupling=0.0 if lazy else 4.0) for _ in range(2))
    if lazy:
        events = list(FORWARD.descend(ledger, goal, PLENTY))
    else:
        events = list(FastGreedy(ledger, Ascent(goal), 0, exact=True).steps())
    expected = forward_selection(count, lambda text: again.mean(Pattern(text)), full - 1)
    assert walked(events) == expected


def test_looks_at_few_of_many_candidates() -> None:
    ledger = landscape(47, 1, coupling=0.0)
    events = list(FORWARD.descend(ledger, targets(47, "1/4"), PLENTY))
    steps = [event for event in events[2:] if isinstance(event, Step)]
    assert sum(step.candidates for step in steps) < 0.5 * sum(46 - n for n in range(1, 12))


def test_leaves_every_mark_and_the_marks_are_listed_from_most_f_layers() -> None:
    search = finished(landscape(12), targets(12, "1", "1/4", "1/2"), Options(FORWARD))
    assert list(search.found) == [6, 3, 1]
    assert str(search.found[1].pattern) == "FSSSSSSSSSSS"
    assert all(choice.is_final for choice in search.found.values())
    counts = [len(step.pattern.full_layers) for step in search.path]
    assert counts == [12, *range(2, 7)]
    for before, step in itertools.pairwise(search.path[1:]):
        assert set(step.pattern.full_layers) - set(before.pattern.full_layers) == {step.layer}


# -- both: layers that are free to share only together are found ---------------------------------

FEW, PAIRS = 24, ((4, 5), (9, 10), (15, 16), (20, 21))
ALONE, PLAIN = 1.0, 0.2


class Pairs:
    """Some pairs of layers cost nothing shared together and much alone; all others a little each.

    The best pattern with 12 F layers shares all four pairs and four single layers: 4 x 0.2 nats.
    """

    kind, in_flight, by_batch, num_layers = "pairs", 1, False, FEW
    batch_tokens = (1000,) * 32

    def loss(self, pattern: Pattern, batches: Sequence[int]) -> Floats:
        shared = set(pattern.shared_layers)
        cost = PLAIN * len(shared - {layer for pair in PAIRS for layer in pair})
        cost += sum(ALONE for pair in PAIRS if len(shared & set(pair)) == 1)
        levels: Floats = 2.0 + 0.1 * np.sin(np.asarray(batches, dtype=float))
        return levels + cost


@pytest.mark.parametrize("refine", [False, True])
def test_both_finds_hidden_pairs_that_fast_misses(refine: bool) -> None:
    fast, combined = (
        finished(Ledger(Pairs()), targets(FEW, "12"), Options(method, refine=refine))
        for method in (FAST, BOTH)
    )
    [fast_only], [two] = fast.found.values(), combined.found.values()
    assert two.loss - combined.start_loss == pytest.approx(4 * PLAIN)  # the optimum
    assert all(set(pair) <= set(two.pattern.shared_layers) for pair in PAIRS)
    assert fast_only.loss - fast.start_loss > 2 * (two.loss - combined.start_loss)


@pytest.mark.parametrize("seed", range(6))
def test_both_is_as_good_as_the_better_of_the_two(seed: int) -> None:
    combined, *alone = (
        finished(
            landscape(FEW, seed, batches=32), targets(FEW, *MARKS), Options(method, refine=False)
        )
        for method in (BOTH, FAST, FORWARD)
    )
    assert list(combined.found) == list(alone[0].found)
    for count, pattern in combined.found.items():
        assert pattern.loss <= min(search.found[count].loss for search in alone) + 1e-12
    assert combined.search_tokens <= combined.budget.total == 2 * alone[0].budget.total


class Hidden(SeenEvaluator):
    """At every size one pattern loses nothing, which the one pass sees and no walk comes by."""

    num_hidden = 10

    def kept_mass(self, batch: int) -> Floats:
        """Layers 1 to 10 keep little under another layer's list; the others all, or nearly."""
        mass = super().kept_mass(batch) * 1e-3 + 1.0
        mass[1 : self.num_hidden + 1] = 0.5
        return np.tril(mass)

    kept_list = kept_mass

    def _damage(self, pattern: Pattern, batches: np.ndarray) -> Floats:
        damage = super()._damage(pattern, batches)
        is_hidden = pattern.full_layers == (*range(self.num_hidden + 1),)
        return 0 * damage if is_hidden else 1 + damage * (1 + pattern.is_full(1))


@pytest.mark.parametrize("refine", [False, True])
@pytest.mark.parametrize("methods", [METHODS_IN_PROCESS, METHODS_FROM_LISTS])
def test_both_begins_from_one_pass_where_layers_or_lists_can_be_seen(
    methods: Mapping[str, Method], refine: bool
) -> None:
    goal, searches = targets(FEW, "11", "3"), {}
    for method in (BOTH, methods["both"]):
        ledger = Ledger(Hidden(FEW, 32, 1))
        searches[method.in_words] = finished(ledger, goal, Options(method, refine=refine))
    without, from_one_pass = searches.values()
    assert from_one_pass.found[11].pattern.full_layers == tuple(range(11))
    assert from_one_pass.found[11].searched == from_one_pass.found[11].pattern
    assert without.found[11].pattern != from_one_pass.found[11].pattern
    assert from_one_pass.budget == without.budget
    assert from_one_pass.search_tokens <= from_one_pass.budget.total
    assert [step.layer for step in from_one_pass.path].count(None) == 3


def test_a_start_that_misleads_is_not_kept() -> None:
    """Random numbers for the one pass: the walks' patterns are better, so they are the answer."""
    goal, evaluator = targets(FEW, *MARKS), SeenEvaluator(FEW, 32, 3)
    evaluator.is_blind = True
    without, from_one_pass = (
        finished(Ledger(evaluator), goal, Options(method, refine=False))
        for method in (BOTH, STARTED)
    )
    blind = finished(Ledger(evaluator), goal, Options(METHODS_IN_PROCESS["one-pass"], refine=False))
    assert not blind.is_measured
    assert blind.search_tokens == sum(evaluator.batch_tokens)
    for count, choice in from_one_pass.found.items():
        assert choice.loss == pytest.approx(without.found[count].loss, rel=0.02)
        assert choice.loss < blind.ledger.mean(blind.found[count].pattern)


def test_the_path_and_the_log_hold_both_ways(tmp_path: Path) -> None:
    search, log = searched(tmp_path, SyntheticEvaluator(12, 16), "1/4", method="both", share=0.6)
    counts = [len(step.pattern.full_layers) for step in search.path]
    assert counts == [*range(12, 2, -1), 12, *range(2, 4)]
    down, up = log.split("way up: each flip makes one more layer F")
    assert "way down: each flip makes one more layer S" in down
    assert "-> F" in up.split("loss")[0]
    assert "-> F" not in down
    assert "-> S" not in up


def test_both_is_the_default_where_the_budget_allows_it() -> None:
    goal, tokens = targets(47, "1/2", "1/4"), (1000,) * 32
    for share, expected in ((None, BOTH), (0.25, BOTH), (0.1, FAST)):
        options, why = Options.best(goal, tokens, share=share)
        assert options.method == expected
        assert bool(why) == (share == 0.1)
        assert options.budget(goal, tokens).share == pytest.approx(share or 0.2, abs=1e-3)
    assert "--budget 0.1 leaves each of two searches less" in why
