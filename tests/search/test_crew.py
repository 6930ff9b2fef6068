"""Several calls at a time: nothing twice, guesses where a thread idles, errors to who waits."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from benchmarks.search_landscape import SyntheticEvaluator
from sglang_indexcache.errors import SearchError
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.evaluators import BatchLosses
from sglang_indexcache.search.ledger import Ledger
from sglang_indexcache.search.options import Options
from sglang_indexcache.search.run import Search
from tests.search.helpers import free, targets

FULL, WANTED, GUESSED = Pattern("FFFF"), Pattern("FSFS"), Pattern("FFSS")


class Wide(SyntheticEvaluator):
    """``servers`` of the landscape; notes every call, and fails for ``broken``."""

    def __init__(self, servers: int, layers: int = 4, batches: int = 8, tokens: int = 1000) -> None:
        super().__init__(layers, batches, tokens=tokens)
        self.in_flight = servers
        self.calls: list[tuple[Pattern, tuple[int, ...]]] = []
        self.broken: set[Pattern] = set()
        self.meeting: threading.Barrier | None = None

    def loss(self, pattern: Pattern, batches: Sequence[int]) -> BatchLosses:
        self.calls.append((pattern, tuple(batches)))
        if self.meeting:
            self.meeting.wait(60)
        if pattern in self.broken:
            raise SearchError(f"{pattern} is broken")
        return super().loss(pattern, batches)

    @property
    def cells(self) -> list[tuple[Pattern, int]]:
        return [(pattern, batch) for pattern, batches in self.calls for batch in batches]


def test_one_patterns_batches_are_spread_over_the_servers() -> None:
    """They were one call once, while the other servers idled."""
    evaluator = Wide(4)
    evaluator.meeting = threading.Barrier(4)  # passed only by four calls at the same time
    Ledger(evaluator).losses(WANTED)
    assert sorted(batches for _, batches in evaluator.calls) == [(0, 1), (2, 3), (4, 5), (6, 7)]


def test_calls_are_cut_by_tokens() -> None:
    evaluator = Wide(1, tokens=1000)
    Ledger(evaluator, call_tokens=3000).many([FULL, WANTED])
    assert [len(batches) for _, batches in evaluator.calls] == [3, 3, 2] * 2
    evaluator = Wide(1, tokens=1_600_000)  # a batch of 8 x 200K is more than a call should carry
    Ledger(evaluator).losses(FULL)
    assert [len(batches) for _, batches in evaluator.calls] == [1] * 8


def test_guesses_are_measured_where_a_server_idles_and_never_counted() -> None:
    evaluator = Wide(3, batches=4)
    ledger = Ledger(evaluator)
    ledger.ahead([GUESSED], [0, 1])
    assert evaluator.calls == []  # nothing is waited for: what comes next should find all free
    evaluator.meeting = threading.Barrier(3)
    ledger.losses(WANTED, [0])
    assert set(evaluator.cells) == {(WANTED, 0), (GUESSED, 0), (GUESSED, 1)}
    evaluator.meeting = None
    assert ledger.spent == 1000
    ledger.losses(GUESSED, [0, 1])
    assert len(evaluator.cells) == 3
    assert (ledger.spent, ledger.ahead_tokens) == (3000, 0)


def test_one_server_measures_nothing_ahead() -> None:
    evaluator = Wide(1)
    ledger = Ledger(evaluator)
    ledger.ahead([GUESSED], [0, 1])
    ledger.losses(WANTED, [0])
    assert evaluator.cells == [(WANTED, 0)]


def test_a_guess_that_fails_is_told_only_to_who_asks_for_it() -> None:
    evaluator = Wide(2)
    evaluator.broken = {GUESSED}
    evaluator.meeting = threading.Barrier(2)
    ledger = Ledger(evaluator)
    ledger.ahead([GUESSED], [0])
    ledger.losses(WANTED, [0])
    evaluator.meeting = None
    with pytest.raises(SearchError, match="FFSS is broken"):
        ledger.losses(GUESSED, [0])
    assert ledger.losses(WANTED).shape == (8,)  # and it goes on


@pytest.mark.parametrize("servers", [2, 5])
@pytest.mark.parametrize("seed", range(3))
def test_look_ahead_changes_no_decision(servers: int, seed: int) -> None:
    searches = []
    for count in (1, servers):
        evaluator = Wide(count, layers=16, batches=16)
        evaluator.__dict__.update(SyntheticEvaluator(16, 16, seed).__dict__)
        search = Search(Ledger(evaluator), free(16), targets(16, "1/2", "1/4"), Options())
        for _ in search.run():
            pass
        assert len(evaluator.cells) == len(set(evaluator.cells))
        measured = 1000 * len(evaluator.cells)
        assert measured >= search.ledger.spent + search.ledger.ahead_tokens
        searches.append(search)
    alone, several = searches
    assert several.path == alone.path
    assert several.found == alone.found
    assert several.search_tokens == alone.search_tokens
    assert alone.ledger.ahead_tokens == 0
