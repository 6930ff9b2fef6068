"""Which pattern each row of a forward obeys: the rows that a plain reading gives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_indexcache.errors import StaleIndexError
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.active import ActivePattern
from sglang_indexcache.serving.rows import RequestIds, RowPatterns, patterns_of_rows
from tests.serving.plans import plan

FIRST, SECOND, THIRD = Pattern("FSS"), Pattern("FFS"), Pattern("FFF")


def of_each(rows: RowPatterns) -> list[Pattern]:
    """The pattern of each row, of which there are several."""
    assert rows.rows is not None
    return [rows.patterns[place] for place in rows.rows.tolist()]


def serving(mode: str = "live") -> ActivePattern:
    return ActivePattern(plan("FSF", mode=mode))


def batch(*patterns: Pattern, lengths: list[int] | None = None, padding: int = 0) -> Any:
    """A batch of requests with these patterns: a decode, or a prefill of ``lengths`` tokens."""
    requests = [SimpleNamespace(rid=str(i), indexcache_pattern=p) for i, p in enumerate(patterns)]
    count = len(patterns) if lengths is None else sum(lengths)
    return SimpleNamespace(
        rids=RequestIds(requests),  # type: ignore[arg-type]
        forward_mode=SimpleNamespace(is_decode=lambda: lengths is None),
        extend_seq_lens_cpu=lengths,
        positions=torch.empty(count + padding),
    )


def test_requests_of_one_pattern_need_no_rows() -> None:
    rows = RowPatterns.of([Pattern("FS"), Pattern("FS")], [3, 1], torch.empty(4))
    assert rows == RowPatterns.one(Pattern("FS"))


def test_rows_behind_the_last_go_with_the_first_pattern() -> None:
    rows = RowPatterns.of([FIRST, SECOND], [1, 2], torch.empty(5))
    assert of_each(rows) == [FIRST, SECOND, SECOND, FIRST, FIRST]


def test_lengths_beyond_the_requests_are_those_of_padding() -> None:
    rows = RowPatterns.of([FIRST, SECOND], [1, 2, 4], torch.empty(7))
    assert of_each(rows) == [FIRST, SECOND, SECOND, FIRST, FIRST, FIRST, FIRST]


def test_a_part_has_the_rows_of_its_place() -> None:
    rows = RowPatterns.of([FIRST, SECOND, THIRD], [1, 2, 1], torch.empty(4))
    assert of_each(rows.cut(1, 4)) == [SECOND, SECOND, THIRD]
    assert RowPatterns.one(FIRST).cut(1, 4) == RowPatterns.one(FIRST)


def test_full_rows_are_those_whose_own_pattern_is_f_there() -> None:
    rows = RowPatterns.of([FIRST, SECOND, THIRD], [1, 2, 1], torch.empty(4))
    found = [rows.full_rows(layer).tolist() for layer in range(3)]
    assert found == [[True] * 4, [False, True, True, True], [False, False, False, True]]


@pytest.mark.parametrize("padding", [0, 2])
def test_a_decode_has_a_row_a_request(padding: int) -> None:
    rows = patterns_of_rows(batch(FIRST, SECOND, FIRST, padding=padding), serving())
    assert of_each(rows) == [FIRST, SECOND, FIRST] + [FIRST] * padding


@pytest.mark.parametrize("padding", [0, 2])
def test_a_prefill_has_a_row_a_token(padding: int) -> None:
    one = batch(SECOND, FIRST, lengths=[2, 3], padding=padding)
    rows = patterns_of_rows(one, serving())
    assert of_each(rows) == [SECOND] * 2 + [FIRST] * 3 + [SECOND] * padding


def test_an_idle_rank_runs_the_default() -> None:
    idle = SimpleNamespace(rids=[])
    assert patterns_of_rows(idle, serving()) == RowPatterns.one(Pattern("FSF"))  # type: ignore[arg-type]


def test_static_mode_has_one_pattern_whatever_requests_say() -> None:
    rows = patterns_of_rows(batch(FIRST, SECOND), serving("static"))
    assert rows == RowPatterns.one(Pattern("FSF"))


def test_requests_whose_patterns_nobody_told_are_noticed() -> None:
    unknown = batch(FIRST)
    unknown.rids = ["1"]
    with pytest.raises(StaleIndexError, match="without the patterns of its requests"):
        patterns_of_rows(unknown, serving())
