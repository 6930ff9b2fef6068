"""Nothing is measured twice, everything is counted once, and a kill costs one line."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sglang_indexcache.errors import SearchError
from sglang_indexcache.lab.search.evaluators import Floats
from sglang_indexcache.lab.search.judged import Judged
from sglang_indexcache.lab.search.ledger import Ledger, open_journal
from sglang_indexcache.pattern import Pattern
from tests.fixtures.landscape import SeenEvaluator, SyntheticEvaluator
from tests.lab.search.helpers import finished, landscape, targets

IDENTITY = {"checkpoint": "a", "data": "b"}
ONE = {"pattern": "FFS", "batches": [0, 1], "losses": [2.0, 0.1 + 0.2]}
TWO = {"pattern": "FSS", "batches": [1], "losses": [1 / 3]}
FULL, WANTED, BROKEN = Pattern("FFFF"), Pattern("FSFS"), Pattern("FFSS")


def filled(path: Path) -> bytes:
    with open_journal(path, IDENTITY) as journal:
        journal.write(ONE)
        journal.write(TWO)
    return path.read_bytes()


def test_a_journal_survives_a_cut_at_every_byte(tmp_path: Path) -> None:
    """Whatever a kill leaves of the last line, the whole lines before it count, bit for bit."""
    content = filled(tmp_path / "whole")
    for length in range(len(content) + 1):
        path = tmp_path / f"cut-{length}"
        path.write_bytes(content[:length])
        finished = max(content[:length].count(b"\n") - 1, 0)
        with open_journal(path, IDENTITY) as journal:
            assert journal.entries == [ONE, TWO][:finished]
            journal.write(TWO)
        with open_journal(path, IDENTITY) as journal:
            assert journal.entries == [*[ONE, TWO][:finished], TWO]
        path.unlink()


def test_an_evaluator_by_batch_keeps_every_batch_that_it_did(tmp_path: Path) -> None:
    evaluator = SyntheticEvaluator(4, 6)
    evaluator.by_batch = True
    calls: list[int] = []
    measure = evaluator.loss

    def stops_in_the_middle(pattern: Pattern, batches: Sequence[int]) -> Floats:
        if len(calls) == 4:
            raise KeyboardInterrupt
        calls.extend(batches)
        return measure(pattern, batches)

    evaluator.loss = stops_in_the_middle  # type: ignore[method-assign]
    with open_journal(tmp_path / "j", IDENTITY) as journal, pytest.raises(KeyboardInterrupt):
        Ledger(evaluator, journal).losses(FULL)
    with open_journal(tmp_path / "j", IDENTITY) as journal:
        assert [entry["batches"] for entry in journal.entries] == [[0], [1], [2], [3]]


def test_a_journal_belongs_to_one_search_at_a_time(tmp_path: Path) -> None:
    filled(tmp_path / "j")
    with pytest.raises(SearchError, match=r"different: data \('b' then, 'c' now\).*--output"):
        open_journal(tmp_path / "j", {"checkpoint": "a", "data": "c"})
    with (
        open_journal(tmp_path / "j", IDENTITY),
        pytest.raises(SearchError, match="in use by another"),
    ):
        open_journal(tmp_path / "j", IDENTITY)


@pytest.mark.parametrize("line", [b"{broken", b"[]", b'{"pattern": "F"}'])
def test_damage_in_the_middle_is_an_error(tmp_path: Path, line: bytes) -> None:
    lines = filled(tmp_path / "j").split(b"\n")
    (tmp_path / "j").write_bytes(b"\n".join([lines[0], line, lines[2], b""]))
    with pytest.raises(SearchError, match="damaged at line 2"):
        Ledger(SyntheticEvaluator(3), open_journal(tmp_path / "j", IDENTITY))


class Wide(SyntheticEvaluator):
    """``servers`` of the landscape; notes every call, and fails for one pattern."""

    def __init__(
        self, servers: int, layers: int = 4, batches: int = 8, seed: int = 0, tokens: int = 1000
    ) -> None:
        super().__init__(layers, batches, seed, tokens=tokens)
        self.in_flight = servers
        self.calls: list[tuple[Pattern, tuple[int, ...]]] = []
        self.meeting: threading.Barrier | None = None

    def loss(self, pattern: Pattern, batches: Sequence[int]) -> Floats:
        self.calls.append((pattern, tuple(batches)))
        if self.meeting:
            self.meeting.wait(60)
        if pattern == BROKEN:
            raise SearchError(f"{pattern} is broken")
        return super().loss(pattern, batches)

    @property
    def cells(self) -> list[tuple[Pattern, int]]:
        return [(pattern, batch) for pattern, batches in self.calls for batch in batches]


@pytest.mark.parametrize("servers", [1, 4])
def test_measures_nothing_twice_and_counts_the_same_after_a_restart(
    tmp_path: Path, servers: int
) -> None:
    def ask(ledger: Ledger) -> tuple[list[float], int]:
        ledger.losses(WANTED, [1])
        losses = ledger.many([WANTED, FULL, WANTED])
        ledger.losses(FULL, [0, 3])
        return [float(v) for v in losses.ravel()], ledger.spent

    evaluator = Wide(servers, batches=4)
    with open_journal(tmp_path / "j", IDENTITY) as journal:
        before = ask(Ledger(evaluator, journal, call_tokens=2000))
    assert len(evaluator.cells) == len(set(evaluator.cells)) == 8
    assert before == ask(Ledger(SyntheticEvaluator(4, 4)))
    with open_journal(tmp_path / "j", IDENTITY) as journal:
        again = Ledger(evaluator, journal)
        assert again.known_tokens == 8000
        assert ask(again) == before
    assert len(evaluator.cells) == 8
    assert again.spent == 8000


def test_cost_is_what_asking_adds() -> None:
    ledger = landscape(4, batches=4)
    ledger.losses(WANTED, [0, 1])
    predicted = ledger.cost([WANTED, FULL, WANTED], [1, 2])
    before = ledger.spent
    ledger.many([WANTED, FULL], [1, 2])
    assert ledger.spent - before == predicted == 3000


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


@pytest.mark.parametrize("servers", [1, 2])
def test_a_failure_ends_what_was_asked_and_nothing_else(servers: int) -> None:
    evaluator = Wide(servers)
    ledger = Ledger(evaluator, call_tokens=1000)
    with pytest.raises(SearchError, match="FFSS is broken"):
        ledger.many([BROKEN, FULL, WANTED])
    assert len(evaluator.calls) < 16
    assert np.array_equal(ledger.losses(WANTED), landscape(4).losses(WANTED))


@pytest.mark.parametrize("seed", range(3))
def test_the_number_of_servers_changes_no_decision(seed: int) -> None:
    searches = []
    for count in (1, 5):
        evaluator = Wide(count, layers=16, batches=16, seed=seed)
        search = finished(Ledger(evaluator), targets(16, "1/2", "1/4"))
        assert len(evaluator.cells) == len(set(evaluator.cells)) == search.search_tokens / 1000
        searches.append(search)
    alone, several = searches
    assert several.path == alone.path
    assert several.found == alone.found
    assert several.search_tokens == alone.search_tokens


def test_a_pass_over_layer_pairs_counts_once() -> None:
    """Two steps of a search look at the same matrices."""
    ledger = Ledger(SeenEvaluator(4, 2))
    for _ in range(2):
        ledger.pairs("kept_mass", 0)
    assert ledger.spent == ledger.known_tokens > 0


def test_a_divergence_that_is_no_number_ends_the_search() -> None:
    evaluator = SyntheticEvaluator(4, 3)
    judge = evaluator.judge

    def broken(pattern: Pattern, batches: Sequence[int]) -> list[Judged]:
        return [replace(each, kl={"text": math.nan}) for each in judge(pattern, batches)]

    evaluator.judge = broken  # type: ignore[method-assign]
    with pytest.raises(SearchError, match="on batch 0 is nan"):
        Ledger(evaluator).judged(WANTED)


def test_what_was_judged_is_not_judged_again(tmp_path: Path) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("it was judged before")

    evaluator = SyntheticEvaluator(4, 3)
    with open_journal(tmp_path / "j", IDENTITY) as journal:
        first = Ledger(evaluator, journal).judged(WANTED)
    evaluator.judge = refuse  # type: ignore[assignment,method-assign]
    with open_journal(tmp_path / "j", IDENTITY) as journal:
        ledger = Ledger(evaluator, journal)
        assert ledger.judged(WANTED) == first
        assert ledger.spent == ledger.known_tokens == 3000
        with pytest.raises(AssertionError):
            ledger.judged(FULL)
