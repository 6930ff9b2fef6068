"""Passages that come again at the end of a text."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sglang_indexcache.lab.data.marking import Marked
from sglang_indexcache.lab.search.passages import CUE, LENGTH, MOST, Passages, with_passages


@given(st.integers(2, 20_000), st.integers(0, 9))
def test_a_text_keeps_its_length_and_three_quarters_of_itself(length: int, seed: int) -> None:
    passages = Passages.of(length, seed)
    assert passages.kept + passages.length * len(passages.starts) == length
    assert 4 * passages.kept >= 3 * length
    assert len(passages.starts) == min(MOST, max(1, length // (4 * LENGTH))) or length < 32
    assert len(passages.counted) == (passages.length - passages.cue) * len(passages.starts)
    for start in passages.starts:
        assert 0 <= start <= passages.kept - passages.length
    # No two begin at one place, and none is all cue.
    assert len(set(passages.starts)) == len(passages.starts)
    assert not passages.starts or 0 < passages.cue < passages.length


def test_what_counts_stands_word_for_word_before() -> None:
    ids = tuple(range(1000, 1000 + 1024))
    row = with_passages(Marked(ids, np.zeros(1024, dtype=bool)))
    start = 1024 - 4 * LENGTH
    assert row.ids[:start] == ids[:start]
    for place in range(4):
        first = start + place * LENGTH
        passage = row.ids[first : first + LENGTH]
        assert passage == tuple(range(passage[0], passage[0] + LENGTH))  # as it stands in the text
        assert passage[-1] < ids[start]
        marks = row.answers[first : first + LENGTH].tolist()
        assert marks == [False] * CUE + [True] * (LENGTH - CUE)
    assert row.answers[:start].tolist() == [False] * (start // 2) + [True] * (start // 2)
    again = with_passages(Marked(ids, np.ones(1024, dtype=bool)))
    assert (again.ids, again.answers.tolist()) == (row.ids, row.answers.tolist())


def test_a_text_that_is_too_short_stays_as_it_is() -> None:
    row = with_passages(Marked(tuple(range(31)), np.zeros(31, dtype=bool)))
    assert row.ids == tuple(range(31))
    assert row.answers.tolist() == [False] * 15 + [True] * 16
