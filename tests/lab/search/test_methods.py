"""Patterns that each method finds, against plain loops, and rules that all of them keep."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_indexcache.errors import SearchError
from sglang_indexcache.lab.search.evaluators import Floats
from sglang_indexcache.lab.search.judged import SMALL_LOSS, Judged, TokenChanges
from sglang_indexcache.lab.search.ledger import Ledger
from sglang_indexcache.lab.search.methods import METHODS
from sglang_indexcache.lab.search.methods.greedy import evaluations
from sglang_indexcache.lab.search.recall import PASSAGES, TEXT
from sglang_indexcache.lab.search.rules import Constraints, parse_targets
from sglang_indexcache.lab.search.run import Search
from sglang_indexcache.pattern import Pattern
from tests.fixtures.landscape import SeenEvaluator
from tests.lab.search.helpers import finished, greedy, landscape, targets
from tests.lab.search.oracle import algorithm_1, every_pattern

GREEDY, DEFAULT = METHODS["greedy"], METHODS["proposals"]
MARKS = ("1/2", "1/4", "1/8")


@pytest.mark.parametrize("name", ["greedy", "proposals", "one-pass"])
def test_obeys_every_constraint(name: str) -> None:
    shipped = Pattern("FFSFFSFSFFFF")
    rules = Constraints.make(shipped, keep_full=[4, 6])
    goal = parse_targets(["7", "3"], rules)
    events = [*METHODS[name].descend(Ledger(SeenEvaluator(12, 8)), goal)]
    for text in (str(event.pattern) for event in events):
        assert text[0] == text[4] == text[6] == "F"
        assert text[2] == text[5] == text[7] == "S"
    assert len(events) == {"greedy": 7, "proposals": 2, "one-pass": 2}[name]


class Blind:
    """An evaluator whose context is too short: every pattern loses the same."""

    kind, in_flight, by_batch, num_layers = "blind", 1, False, 6
    batch_tokens = (1, 1, 1, 1)

    def loss(self, pattern: Pattern, batches: Sequence[int]) -> Floats:
        return np.arange(4.0)[list(batches)]

    def judge(self, pattern: Pattern, batches: Sequence[int]) -> list[Judged]:
        raise NotImplementedError


def test_a_tie_of_all_candidates_is_no_pattern() -> None:
    steps = GREEDY.descend(Ledger(Blind()), targets(6, "2"))
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


# -- proposals, and the divergence that decides ---------------------------------------------------


class Misled(SeenEvaluator):
    """Every document's matrix proposes another layer, and only one of them keeps what is recalled.

    Under all others text alone looks as good, or better: it is the recalled places that decide.
    """

    right = 4

    def kept_mass(self, batch: int) -> Floats:
        """Say that layer ``1 + batch`` serves all behind it, and no other does."""
        mass = np.full((self.num_layers, self.num_layers), 0.5)
        mass[:, 1 + batch] = 1.0
        matrix = np.tril(mass, -1) + np.eye(self.num_layers)
        return np.stack([matrix, matrix])

    def judge(self, pattern: Pattern, batches: Sequence[int]) -> list[Judged]:
        far = 0.0 if pattern.is_full(self.right) else 1.0
        text = 0.02 if pattern.is_full(self.right) else 0.01
        text = 0.0 if not pattern.shared_layers else text
        far = 0.0 if not pattern.shared_layers else far
        kl = {"text": text, "passages": far}
        losses = {"text": 2.0 + text, "passages": 1.0 + far}
        one = Judged(2.0 + text, losses, kl, {"text": 1.0}, {"passages": 0.9 - far / 2})
        return [one for _ in batches]


def test_what_keeps_recall_wins_though_text_alone_prefers_another() -> None:
    ledger = Ledger(Misled(30, 7))
    search = finished(ledger, targets(30, "2"), DEFAULT)
    [found] = search.found.values()
    assert found.pattern.full_layers == (0, Misled.right)
    by_text = min(
        every_pattern(30, 2), key=lambda p: Misled(30, 7).judge(Pattern(p), [0])[0].kl["text"]
    )
    assert not Pattern(by_text).is_full(Misled.right)
    # One document of seven proposed it, and what lacks it was run and is worse by (1 - 0.01) / 2.
    sure = found.layers[Misled.right]
    assert sure.share == pytest.approx(1 / 7)
    assert sure.is_sure
    assert sure.without is not None
    assert sure.without.low < (1.0 - 0.01) / 2 < sure.without.high


@pytest.mark.parametrize("layers", [30, 47])
def test_it_takes_a_twentieth_of_algorithm_1s_tokens(layers: int) -> None:
    """At the layers of released models, with as many documents as it takes by default."""
    search = finished(Ledger(SeenEvaluator(layers, 16)), targets(layers, *MARKS), DEFAULT)
    assert search.search_tokens <= search.exhaustive / 20


def test_it_takes_no_more_tokens_than_it_says() -> None:
    ledger, goal = Ledger(SeenEvaluator(30, 16)), targets(30, *MARKS)
    assert len([*DEFAULT.descend(ledger, goal)]) == 3
    assert 0 < ledger.spent <= DEFAULT.least(goal, ledger.tokens_of_batches)


@pytest.mark.parametrize("layers", [30, 47, 61, 78])
def test_the_bound_on_its_tokens_is_a_twentieth_of_algorithm_1s(layers: int) -> None:
    search = Search(Ledger(SeenEvaluator(layers, 16)), targets(layers, *MARKS), DEFAULT)
    assert search.expected_tokens <= search.exhaustive / 20


class Together(SeenEvaluator):
    """Neither of two lists recalls alone what both do, and one helps little more than others."""

    wanted = (9, 13)

    def judge(self, pattern: Pattern, batches: Sequence[int]) -> list[Judged]:
        judged = super().judge(pattern, batches)
        there = sum(pattern.is_full(layer) for layer in self.wanted)
        if there == 2 or not pattern.shared_layers:
            return judged
        worse = {kind: loss + 2 - 0.1 * there for kind, loss in judged[0].losses.items()}
        return [replace(each, losses=worse) for each in judged]


@pytest.mark.parametrize("seed", range(4))
def test_exchanges_find_two_layers_that_help_only_together(seed: int) -> None:
    """One target learns from what is run for another."""
    search = finished(Ledger(Together(24, 8, seed)), targets(24, *MARKS), DEFAULT)
    for count in (12, 6):
        assert {9, 13} <= set(search.found[count].pattern.full_layers)


def test_exchanges_find_what_no_proposal_has() -> None:
    """Layers whose own lists copy badly are seen by exchanges, for pairs of layers do not tell."""

    class Hidden(SeenEvaluator):
        wanted = 9

        def judge(self, pattern: Pattern, batches: Sequence[int]) -> list[Judged]:
            judged = super().judge(pattern, batches)
            if pattern.is_full(self.wanted) or not pattern.shared_layers:
                return judged
            worse = {kind: loss + 0.5 for kind, loss in judged[0].losses.items()}
            return [replace(each, losses=worse) for each in judged]

    for seed in range(4):
        search = finished(Ledger(Hidden(24, 8, seed)), targets(24, "6"), DEFAULT)
        assert search.found[6].pattern.is_full(Hidden.wanted)


class Late(SeenEvaluator):
    """A layer helps only where nearly all others of the best pattern are F."""

    best: tuple[int, ...]
    wanted: int
    lacking = 1

    def gain(self, batch: int) -> float:
        return 0.3

    def judge(self, pattern: Pattern, batches: Sequence[int]) -> list[Judged]:
        judged = super().judge(pattern, batches)
        missing = {*self.best} - {*pattern.full_layers}
        helps = pattern.is_full(self.wanted) and len(missing) <= self.lacking
        if not pattern.shared_layers or not helps:
            return judged
        return [
            replace(each, losses={k: loss - self.gain(batch) for k, loss in each.losses.items()})
            for each, batch in zip(judged, batches, strict=True)
        ]


class Doubtful(Late):
    """The layer helps beside fewer of the others, and harms on a third of the documents."""

    lacking = 3

    def gain(self, batch: int) -> float:
        return -0.2 if batch % 3 == self.wanted % 2 else 0.3


def missed(evaluator: type[Late], layers: int, count: str, seed: int = 0) -> list[int]:
    """Return the layers, one at a time the one that helps, that a search does not find."""
    search = finished(Ledger(SeenEvaluator(layers, 8, seed)), targets(layers, count), DEFAULT)
    best, missing = search.found[int(count)].pattern, []
    for wanted in best.shared_layers:
        late = evaluator(layers, 8, seed)
        late.best, late.wanted = best.full_layers, wanted
        search = finished(Ledger(late), targets(layers, count), DEFAULT)
        if not search.found[int(count)].pattern.is_full(wanted):
            missing.append(wanted)
    return missing


def test_layers_that_help_only_in_the_best_pattern_are_tried_there() -> None:
    """Ten of the eleven others are found; with tries halfway alone, four were."""
    assert len(missed(Late, 16, "5")) <= 1


def test_a_layer_that_a_document_hides_is_run_again_on_others() -> None:
    """Twelve of 18 are found; with tries before the last round alone, nine were."""
    assert len(missed(Doubtful, 24, "6", seed=1)) <= 6


def test_every_kind_of_token_weighs_alike() -> None:
    kinds = np.array([TEXT] * 40 + [PASSAGES] * 10, dtype=np.uint8)
    loss = np.array([2.0] * 40 + [7.0] * 10)
    judged = Judged.of(TokenChanges(loss, *np.zeros((3, 50))), kinds)
    assert judged.mixed_loss == pytest.approx(4.5)
    assert judged.loss == pytest.approx(3.0)


@pytest.mark.parametrize("seed", range(3))
def test_what_it_finds_loses_less_than_one_pass_and_little_more_than_algorithm_1(seed: int) -> None:
    """A twentieth of the forwards, on documents that differ, for nearly the same patterns."""

    def added(method: str) -> float:
        evaluator = SeenEvaluator(24, 12, seed, noise=0.5)
        search = finished(Ledger(evaluator), targets(24, *MARKS), METHODS[method])
        start = evaluator.loss(Pattern.full(24), range(12))
        losses = [evaluator.loss(result.pattern, range(12)) for result in search.found.values()]
        return float((np.array(losses) - start).mean())

    assert added("proposals") <= added("one-pass")
    assert added("proposals") <= 1.1 * added("greedy")


@pytest.mark.parametrize("least", [0.0, 1e-9])
def test_a_document_of_certain_answers_decides_nothing(least: float) -> None:
    """One short answer may have a loss of 0 or nearly, whose ratio to another is no measure."""

    class Certain(SeenEvaluator):
        """All documents but one need layer 9, without which that one is a little more certain."""

        def judge(self, pattern: Pattern, batches: Sequence[int]) -> list[Judged]:
            judged = super().judge(pattern, batches)
            is_full = pattern.is_full(9) and bool(pattern.shared_layers)
            lacking = 0.0 if pattern.is_full(9) else 0.5
            certain = 1e-4 if is_full else least
            return [
                replace(each, losses=dict.fromkeys(each.losses, certain))
                if batch == 3
                else replace(each, losses={k: loss + lacking for k, loss in each.losses.items()})
                for each, batch in zip(judged, batches, strict=True)
            ]

    search = finished(Ledger(Certain(24, 8)), targets(24, "6"), DEFAULT)
    assert search.found[6].pattern.is_full(9)


def test_a_target_of_every_indexer_is_all_f() -> None:
    search = finished(Ledger(SeenEvaluator(12, 4)), targets(12, "12"), DEFAULT)
    assert search.found[12].pattern == Pattern.full(12)
    assert set(search.found[12].layers) == set(range(1, 12))
    assert not any(layer.without for layer in search.found[12].layers.values())


def test_the_smallest_retention_that_keeps_recall_is_named() -> None:
    """Between the last target that keeps it and the first that does not, by halving."""

    class Cliff(SeenEvaluator):
        fewest = 9

        def judge(self, pattern: Pattern, batches: Sequence[int]) -> list[Judged]:
            lost = 0.0 if len(pattern.full_layers) >= self.fewest else 3 * SMALL_LOSS
            kl = {"text": 0.01 * len(pattern.shared_layers)}
            one = Judged(2.0, {"text": 2.0}, kl, {"text": 1.0}, {"passages": 0.9 - lost})
            return [one for _ in batches]

    search = finished(Ledger(Cliff(24, 8)), targets(24, *MARKS), DEFAULT)
    assert search.safe is not None
    assert search.safe.mark.full_layers == 9
    assert list(search.found) == [12, 9, 6, 3]
    Cliff.fewest = 24
    search = finished(Ledger(Cliff(24, 8)), targets(24, *MARKS), DEFAULT)
    assert search.safe is None


def test_leaves_every_mark_and_the_marks_are_listed_from_most_f_layers() -> None:
    search = finished(Ledger(SeenEvaluator(12, 8)), targets(12, "1", "1/4", "1/2"), DEFAULT)
    counts = list(search.found)
    assert counts == sorted(counts, reverse=True)
    assert {6, 3, 1} <= set(counts)
    assert str(search.found[1].pattern) == "FSSSSSSSSSSS"
    assert all(choice.is_compared for choice in search.found.values())
