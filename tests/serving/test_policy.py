"""A pattern by prompt length: every length has exactly one, whatever is written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_indexcache.errors import IndexCacheError, LibraryError, SettingsError
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.policy import Policy

KNOWN = {"full": Pattern("FFFF"), "1/2": Pattern("FSFS"), "1/4": Pattern("FSSS")}


def resolve(name: str) -> Pattern:
    if name not in KNOWN:
        raise LibraryError(f"no pattern is called {name!r}")
    return KNOWN[name]


def test_reads_from_left_to_right() -> None:
    policy = Policy.parse("full < 32K <= 1/2 < 128Ki <= 1/4", resolve)
    for length, name in (
        (0, "full"), (31_999, "full"), (32_000, "1/2"), (131_071, "1/2"), (131_072, "1/4"),
        (10**9, "1/4"),
    ):  # fmt: skip
        assert policy.pattern_for(length) == KNOWN[name]
    assert str(policy) == "FFFF < 32K <= FSFS < 128Ki <= FSSS"
    assert Policy.parse(str(policy), Pattern) == policy


def test_spaces_are_for_the_reader() -> None:
    assert Policy.parse("full<32K<=1/2", resolve) == Policy.parse("full < 32K <= 1/2", resolve)


def test_a_pattern_alone_is_for_every_length() -> None:
    assert Policy.parse("1/2", resolve) == Policy.of(Pattern("FSFS"))
    assert str(Policy.parse("1/2", resolve)) == "FSFS"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("full < 32K", "is no choice by prompt length. Write PATTERN < LENGTH <= PATTERN"),
        ("full < 32K < 1/2", "is no choice by prompt length"),
        ("full <= 32K <= 1/2", "is no choice by prompt length"),
        ("< 32K <= 1/2", "lacks a pattern before or behind a length"),
        ("full < 32K <= ", "lacks a pattern before or behind a length"),
        ("full < 32k <= 1/2", "Did you mean 32K"),
        ("full < 32K <= 1/2 < 32K <= 1/4", "must grow from left to right"),
        ("full < 32K <= 1/2 < 16K <= 1/4", "must grow from left to right"),
        ("full < 0 <= 1/2", "a length is a number of tokens"),
        ("full < -1 <= 1/2", "a length is a number of tokens"),
        ("full < many <= 1/2", "a length is a number of tokens"),
        ("full < 32K <= nobody", "no pattern is called 'nobody'"),
        (" " * 9_000 + "full", "no pattern is called"),
        ("full" + " < 1 <= 1/2" * 2_000, r"21,904 characters more is no choice by prompt length"),
        (" " * 300_000, r"characters more is no choice by prompt length"),
        ("<" * 300_000, r"characters more is no choice by prompt length"),
    ],
)
def test_gaps_overlaps_and_nonsense_are_refused(text: str, reason: str) -> None:
    with pytest.raises(IndexCacheError, match=reason):
        Policy.parse(text, resolve)


@given(
    st.lists(st.integers(1, 10**6), unique=True, min_size=1, max_size=5),
    st.integers(0, 2 * 10**6),
    st.data(),
)
def test_agrees_with_a_plain_reading(starts: list[int], length: int, data: st.DataObject) -> None:
    starts.sort()
    names = [data.draw(st.sampled_from(sorted(KNOWN))) for _ in range(len(starts) + 1)]
    words = [names[0]]
    for start, name in zip(starts, names[1:], strict=True):
        words += ["<", str(start), "<=", name]
    expected = names[0]
    for start, name in zip(starts, names[1:], strict=True):
        if length >= start:
            expected = name
    assert Policy.parse(" ".join(words), resolve).pattern_for(length) == KNOWN[expected]


def test_too_many_signs_at_the_end_are_refused() -> None:
    with pytest.raises(SettingsError):
        Policy.parse("full < 32K <= 1/2 <", resolve)
