"""A text is asked for again at its end: passages of it, and facts that it hides."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sglang_indexcache.lab.search.recall import (
    CUE,
    KEYS,
    LENGTH,
    MOST,
    PASSAGES,
    TEXT,
    Passages,
    hidden_facts,
    with_recall,
)


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
    mixed, kinds = with_recall(ids, [])
    start = 1024 - 4 * LENGTH
    assert mixed[:start] == ids[:start]
    for place in range(4):
        first = start + place * LENGTH
        passage = mixed[first : first + LENGTH]
        assert passage == tuple(range(passage[0], passage[0] + LENGTH))  # as it stands in the text
        assert passage[-1] < ids[start]
        marks = kinds[first : first + LENGTH].tolist()
        assert marks == [0] * CUE + [PASSAGES] * (LENGTH - CUE)
    assert kinds[:start].tolist() == [0] * (start // 2) + [TEXT] * (start // 2)


@given(st.integers(2, 3000), st.integers(0, 9))
def test_facts_stand_in_the_text_and_their_answers_are_asked_for_behind_it(
    length: int, seed: int
) -> None:
    facts = hidden_facts(seed, lambda text: [ord(letter) for letter in text])
    ids = tuple(range(10_000, 10_000 + length))
    mixed, kinds = with_recall(ids, facts)
    assert len(mixed) == len(kinds) == length
    own = [token for token in mixed if token < 10_000]
    assert 4 * len(own) <= length  # facts take a quarter at most
    text = "".join(map(chr, mixed))
    shown = [fact for fact in facts if "".join(map(chr, fact[0])) in text and fact[0]]
    answers = [
        fact[2] for fact in facts if "".join(map(chr, (*fact[1], *fact[2]))) in text and fact[2]
    ]
    assert sum(map(len, answers)) == int((kinds == KEYS).sum())
    assert len(shown) == (10 if length >= 3000 else len(shown))
    kept = [token for token in mixed if token >= 10_000]
    assert kept[: len(set(kept))] == list(ids[: len(set(kept))])


def test_a_text_that_is_too_short_stays_as_it_is() -> None:
    mixed, kinds = with_recall(tuple(range(31)), [])
    assert mixed == tuple(range(31))
    assert kinds.tolist() == [0] * 15 + [TEXT] * 16
