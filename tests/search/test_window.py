"""A search under a recent window measures, finds and leaves patterns that have it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.search_landscape import SyntheticEvaluator
from sglang_indexcache.errors import SearchError
from sglang_indexcache.library import load_entry
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.evaluators import Floats
from sglang_indexcache.search.rules import Constraints, window_of
from tests.cli.test_search import TINY, call, documents, said
from tests.search.helpers import searched


class TwoLandscapes(SyntheticEvaluator):
    """Patterns with a window lose what another landscape says, on the same batches."""

    def __init__(self) -> None:
        super().__init__(12, 4 + 4, seed=0)
        self.other = SyntheticEvaluator(12, 4 + 4, seed=5)
        self.asked: set[Pattern] = set()

    def loss(self, pattern: Pattern, batches: Sequence[int]) -> Floats:
        self.asked.add(pattern)
        if pattern.window:
            return self.other.loss(pattern.with_window(0), batches)
        return super().loss(pattern, batches)


@pytest.mark.parametrize("method", ["both", "fast", "forward", "greedy"])
def test_what_is_found_is_what_that_landscape_holds(tmp_path: Path, method: str) -> None:
    evaluator = TwoLandscapes()
    search, _ = searched(tmp_path, evaluator, "1/2+w8", "1/4+w8", held_out=4, method=method)
    assert {pattern.window for pattern in evaluator.asked - {Pattern.full(12)}} == {8}
    assert str(search.path[0].pattern) == "F" * 12
    plain, _ = searched(tmp_path / "o", evaluator.other, "1/2", "1/4", held_out=4, method=method)
    without, _ = searched(tmp_path / "w", SyntheticEvaluator(12, 8), "1/2", "1/4", held_out=4)
    for count, found in search.found.items():
        assert found.pattern == plain.found[count].pattern.with_window(8)
        assert found.pattern.layers != str(without.found[count].pattern)
        assert {p.window for p, _ in found.baselines.values()} == {8}
    entry = load_entry(tmp_path / "x-1of4-w8.yaml")
    assert entry.pattern.endswith("+w8")
    assert (entry.retention, entry.method.details["window"]) == ("1/4", "8")


def test_a_folder_is_of_one_window(tmp_path: Path) -> None:
    searched(tmp_path, SyntheticEvaluator(12, 4), "1/2+w8")
    for target in ("1/2", "1/2+w4"):
        with pytest.raises(SearchError, match=r"another search; different: window \('8' then"):
            searched(tmp_path, SyntheticEvaluator(12, 4), target)


def test_a_way_that_ends_at_the_start_ends_without_a_window() -> None:
    rules = Constraints.make(Pattern("FFSF"), window=8)
    assert str(rules.flipped(Pattern("FSSF+w8"), 1)) == "FFSF"
    assert str(rules.exchanged(Pattern("FSSF+w8"), 3, 1)) == "FFSS+w8"


def test_one_search_has_one_window() -> None:
    assert window_of(["1/2+w8", "12+w8"]) == 8
    assert window_of(None) == 0
    for targets in (["1/2", "1/4+w8"], ["1/2+w4", "1/4+w8"]):
        with pytest.raises(SearchError, match=r"has one for all\. Write the same \+wN"):
            window_of(targets)


def test_the_command_tells_the_window_first(tmp_path: Path) -> None:
    data = documents(tmp_path / "data.jsonl")
    arguments = (
        *("search", "run", "--model", TINY, "--data", data, "--batches", "2", "--held-out", "2"),
        *("--dry-run", "-o", tmp_path / "out"),
    )
    told = said(call(*arguments, "--target", "1/2+w8"))
    assert "window S layers also see the last 8 tokens; the start" in told
    assert "window" not in said(call(*arguments, "--target", "1/2"))
    assert "a recent window is written +wN" in said(call(*arguments, "--target", "1/2+w2000"))
