"""Counters of forwards: rows by phase and pattern, and pairs of queries and keys, one by one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.traffic import (
    MAX_LABELS,
    Traffic,
    is_idle,
    length_bin,
    served_in,
)

torch = pytest.importorskip("torch")
LAYERS, TOPK = 4, 8


def traffic(*indexed: int) -> Traffic:
    return Traffic(range(LAYERS), frozenset(indexed or range(LAYERS)), TOPK)


patterns = st.text("FS", min_size=LAYERS - 1, max_size=LAYERS - 1).map(lambda s: Pattern(f"F{s}"))
requests = st.lists(st.tuples(patterns, st.integers(1, 30), st.integers(0, 30)), max_size=4)


layers = st.sets(st.integers(0, LAYERS - 1))


@given(requests=requests, indexed=layers)
def test_pairs_are_those_of_every_row_with_every_token_that_it_sees(
    requests: list[tuple[Pattern, int, int]], indexed: set[int]
) -> None:
    """Each request is a pattern, rows, and the tokens before them."""
    traffic_seen = Traffic(range(LAYERS), frozenset(indexed), TOPK, flops=80)
    traffic_seen.count("prefill", [(p, rows, rows + before) for p, rows, before in requests])
    expected = {"scored": 0, "skipped": 0}
    requests = requests if any(rows + before > TOPK for _, rows, before in requests) else []
    for layer in indexed:
        runs = any(pattern.is_full(layer) for pattern, *_ in requests)
        for _, rows, before in requests:
            visible = sum(before + row + 1 for row in range(rows))
            expected["scored" if runs else "skipped"] += visible
    for kind, pairs in expected.items():
        assert sum(n for (*_, of), n in traffic_seen.pairs.items() if of == kind) == pairs
    assert traffic_seen.flops_saved == 80 * expected["skipped"]
    assert sum(traffic_seen.tokens.values()) == sum(rows for _, rows, _ in requests) or not requests


@given(st.lists(requests, max_size=4))
def test_what_is_saved_never_falls(forwards: list[list[tuple[Pattern, int, int]]]) -> None:
    """Prometheus takes no counter back."""
    counts = Traffic(range(LAYERS), frozenset(range(LAYERS)), TOPK, flops=80)
    saved = [0]
    for forward in forwards:
        counts.count("decode", [(p, rows, rows + before) for p, rows, before in forward])
        saved.append(counts.flops_saved)
    assert saved == sorted(saved)


def test_bins_by_the_length_of_each_request() -> None:
    counts = traffic()
    counts.count("decode", [(Pattern("FSFS"), 1, 2048), (Pattern("FSFS"), 1, 200_000)])
    assert counts.pairs == {
        ("decode", "2Ki", "scored"): 4096,
        ("decode", "2Ki", "skipped"): 4096,
        ("decode", "more", "scored"): 400_000,
        ("decode", "more", "skipped"): 400_000,
    }
    assert [length_bin(n) for n in (1, 8192, 8193, 131072)] == ["2Ki", "8Ki", "32Ki", "128Ki"]


def test_so_many_patterns_are_counted_apart() -> None:
    counts = traffic()
    names = [f"F{n:07b}".replace("0", "S").replace("1", "F") for n in range(MAX_LABELS + 5)]
    for name in names:
        counts.count("prefill", [(Pattern(name), 2, 2)])
    assert len(counts.tokens) == MAX_LABELS + 1
    assert counts.tokens["prefill", "others"] == 10
    assert counts.tokens["prefill", names[0]] == 2


def batch(mode: str, lengths: Any, **fields: Any) -> Any:
    kinds = ("idle", "decode", "target_verify")
    asks = {f"is_{kind}": lambda kind=kind: kind == mode for kind in kinds}
    return SimpleNamespace(
        forward_mode=SimpleNamespace(**asks),
        batch_size=len(lengths),
        seq_lens_cpu=torch.tensor(lengths),
        **fields,
    )


A, B = Pattern("FSSS"), Pattern("FFSS")


@pytest.mark.parametrize(
    ("batch", "patterns", "expected"),
    [
        (batch("extend", [5, 9], rids=["1", "2"], extend_seq_lens_cpu=[5, 2]), [A, B],
         [(A, 5, 5), (B, 2, 9)]),
        (batch("extend", [5, 1], rids=["1"], extend_seq_lens_cpu=[5, 0]), [], [(B, 5, 5)]),
        (batch("decode", [5, 9], rids=["1", "2"], extend_seq_lens_cpu=None), [A, A],
         [(A, 1, 5), (A, 1, 9)]),
        # A view of a batch that is replayed: padded, and without its requests.
        (batch("decode", [5, 9, 1], num_padding=1), [], [(B, 1, 5), (B, 1, 9)]),
        (batch("target_verify", [9], rids=["1"], spec_info=SimpleNamespace(num_tokens_per_req=4)),
         [], [(B, 4, 9)]),
        (batch("idle", [], rids=[]), [], []),
    ],
)  # fmt: skip
def test_what_a_batch_says_on_the_host(batch: Any, patterns: Any, expected: Any) -> None:
    assert served_in(batch, patterns, B) == expected


@pytest.mark.parametrize(
    ("batch", "idle"),
    [
        (batch("decode", [5], rids=["1"]), False),
        (batch("idle", [], rids=[]), True),
        (batch("extend", [8], rids=[], extend_seq_lens_cpu=[8]), True),  # padded to a request's
        (batch("decode", [5, 9, 1], num_padding=1), False),
        (batch("decode", [1, 1], num_padding=2), True),
        (batch("decode", [1], actual_forward_mode=SimpleNamespace(is_idle=lambda: True)), True),
        (batch("extend", [5]), False),  # a warm-up
    ],
)
def test_a_forward_without_requests(batch: Any, idle: bool) -> None:
    assert is_idle(batch) is idle


def test_without_lengths_nothing_is_counted() -> None:
    unknown = batch("decode", [5], rids=["1"])
    unknown.seq_lens_cpu = None
    assert served_in(unknown, [], B) == []
