import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.search_landscape import SyntheticEvaluator
from sglang_indexcache.errors import SearchError
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.evaluators import BatchLosses
from sglang_indexcache.search.ledger import Ledger, Measured, SearchJournal
from tests.search.helpers import landscape

IDENTITY = {"checkpoint": "a", "data": "b"}


def filled(path: Path) -> bytes:
    with SearchJournal(path, IDENTITY) as journal:
        journal.append(Measured("FFS", (0, 1), (2.0, 0.1 + 0.2), 30, 0.5))
        journal.append(Measured("FSS", (1,), (1 / 3,), 15, 0.25))
    return path.read_bytes()


def test_keeps_every_bit(tmp_path: Path) -> None:
    filled(tmp_path / "j")
    with SearchJournal(tmp_path / "j", IDENTITY) as journal:
        first, second = journal.records
    assert (first.pattern, first.batches, first.losses) == ("FFS", (0, 1), (2.0, 0.1 + 0.2))
    assert (second.pattern, second.losses, second.layer_tokens) == ("FSS", (1 / 3,), 15)


def test_survives_a_cut_at_every_byte(tmp_path: Path) -> None:
    """Whatever a kill leaves of the last line, the whole lines before it count, and no more."""
    content = filled(tmp_path / "whole")
    for length in range(len(content) + 1):
        path = tmp_path / f"cut-{length}"
        path.write_bytes(content[:length])
        finished = max(content[:length].count(b"\n") - 1, 0)
        with SearchJournal(path, IDENTITY) as journal:
            assert len(journal.records) == finished
            journal.append(Measured("FSF", (0,), (1.0,), 15, 0.1))
        with SearchJournal(path, IDENTITY) as journal:
            assert [r.pattern for r in journal.records] == [*["FFS", "FSS"][:finished], "FSF"]
        path.unlink()


def test_belongs_to_one_search(tmp_path: Path) -> None:
    filled(tmp_path / "j")
    with pytest.raises(SearchError, match=r"different: data \('b' then, 'c' now\).*--output"):
        SearchJournal(tmp_path / "j", {"checkpoint": "a", "data": "c"})


def test_long_values_that_differ_are_named_and_not_written_out(tmp_path: Path) -> None:
    plan = {"rows": list(range(99)), "seed": 0, "task": "a"}
    with SearchJournal(tmp_path / "j", {"plan": plan}):
        pass
    with pytest.raises(SearchError, match=r"different: plan rows; plan seed \(0 then, 1 now\)\. G"):
        SearchJournal(tmp_path / "j", {"plan": plan | {"rows": [], "seed": 1}})


def test_damage_in_the_middle_is_an_error(tmp_path: Path) -> None:
    lines = filled(tmp_path / "j").split(b"\n")
    (tmp_path / "j").write_bytes(b"\n".join([lines[0], b"{broken", lines[2], b""]))
    with pytest.raises(SearchError, match="damaged at line 2"):
        SearchJournal(tmp_path / "j", IDENTITY)
    (tmp_path / "j").write_bytes(b"\n".join([lines[0], b'{"pattern": "F"}', b""]))
    with pytest.raises(SearchError, match="damaged at line 2"):
        SearchJournal(tmp_path / "j", IDENTITY)


def test_two_searches_cannot_share_one(tmp_path: Path) -> None:
    with (
        SearchJournal(tmp_path / "j", IDENTITY),
        pytest.raises(SearchError, match="in use by another"),
    ):
        SearchJournal(tmp_path / "j", IDENTITY)


class Counting(SyntheticEvaluator):
    """Notes every (pattern, batch) that it is asked for."""

    def __init__(self) -> None:
        super().__init__(6, 4)
        self.asked: list[tuple[str, int]] = []

    def loss(self, pattern: Pattern, batches: object) -> BatchLosses:
        self.asked += [(str(pattern), batch) for batch in batches]  # type: ignore[attr-defined]
        return super().loss(pattern, batches)  # type: ignore[arg-type]


def test_the_ledger_measures_nothing_twice_and_counts_the_same_after_a_restart(
    tmp_path: Path,
) -> None:
    def ask(ledger: Ledger) -> tuple[list[float], int]:
        ledger.losses(Pattern("FFSFFF"), [1])
        found = ledger.many([Pattern("FFSFFF"), Pattern("FFSFSF"), Pattern("FFSFFF")])
        ledger.losses(Pattern("FFSFSF"), [0, 3])
        return [float(v) for v in found.ravel()], ledger.spent

    evaluator = Counting()
    with SearchJournal(tmp_path / "j", IDENTITY) as journal:
        before = ask(Ledger(evaluator, journal))
    assert sorted(evaluator.asked) == sorted(set(evaluator.asked))
    assert len(evaluator.asked) == 8
    with SearchJournal(tmp_path / "j", IDENTITY) as journal:
        again = Ledger(evaluator, journal)
        assert again.known_tokens == 8000
        assert ask(again) == before
    assert len(evaluator.asked) == 8
    assert (again.measured, again.spent) == (0, 8000)


def test_cost_is_what_asking_adds() -> None:
    ledger = landscape(6, batches=4)
    patterns = [Pattern("FFSFFF"), Pattern("FFSFSF")]
    ledger.losses(patterns[0], [0, 1])
    predicted = ledger.cost([*patterns, patterns[0]], [1, 2])
    before = ledger.spent
    ledger.many(patterns, [1, 2])
    assert ledger.spent - before == predicted == 3000


def test_measures_several_candidates_at_a_time(tmp_path: Path) -> None:
    class Wide(Counting):
        in_flight = 4

    patterns = [Pattern("F" + "".join(c)) for c in np.array(["FSFSF", "SSFFF", "SFFFF", "FFFFS"])]
    wide, plain = Ledger(Wide(), call_tokens=2000), Ledger(Counting())
    assert np.array_equal(wide.many(patterns), plain.many(patterns))
    assert wide.spent == plain.spent == 16000


def test_the_journal_is_plain_json_lines(tmp_path: Path) -> None:
    header, *rest = filled(tmp_path / "j").decode().splitlines()
    assert json.loads(header)["identity"] == IDENTITY
    assert [json.loads(line)["pattern"] for line in rest] == ["FFS", "FSS"]
