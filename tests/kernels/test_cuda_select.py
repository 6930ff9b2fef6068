"""The device's selection code (csrc/common/select.h, indexer/gate.h), on the host.

The same templates that the kernels instantiate run here on an executor that shuffles every loop,
against a sort.
"""

from ctypes import byref, c_int

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.kernels import cuda_host

pytestmark = pytest.mark.csrc

seeds = st.integers(0, 2**31)


def oracle(row: NDArray, k: int) -> NDArray:
    """Return the k largest, ties to the smaller position, ascending, padded with -1."""
    order = np.argsort(-row.astype(np.float64), kind="stable")[:k]
    return np.pad(np.sort(order), (0, k - len(order)), constant_values=-1).astype(np.int32)


def make_row(kind: str, n: int, random: np.random.Generator) -> NDArray:
    normal = random.standard_normal(n).astype(np.float32)
    if kind == "normal":
        return normal
    if kind == "relu":  # more than half of the row is exactly zero, some of it -0.0
        return np.maximum(normal - 0.5, 0) * random.choice(np.float32([1, -1]), n)
    if kind == "equal":
        return np.full(n, normal[0], dtype=np.float32)
    if kind == "few values":
        return random.choice(np.float32([-3, -0.0, 0.0, 1.5, 1.5000001, 2]), n)
    if kind == "one bin":  # differ in the last bits only
        return (np.float32(1.75) + random.integers(0, 9, n).astype(np.float32) * 2**-23).astype(
            np.float32
        )
    if kind == "ascending":
        return np.sort(normal)
    if kind == "descending":
        return np.sort(normal)[::-1].copy()
    if kind == "infinite":
        return np.where(random.random(n) < 0.3, random.choice([np.inf, -np.inf], n), normal).astype(
            np.float32
        )
    if kind == "huge":
        return (normal.astype(np.float64) * 7e37).clip(-3.4e38, 3.4e38).astype(np.float32)
    if kind == "denormal":
        return (normal * np.float32(1e-41)).astype(np.float32)
    raise ValueError(kind)


KINDS = (
    "normal",
    "relu",
    "equal",
    "few values",
    "one bin",
    "ascending",
    "descending",
    "infinite",
    "huge",
    "denormal",
)


@settings(deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=40))
def test_keys_order_as_the_floats_do(values: list[float]) -> None:
    keys = [cuda_host.order_key(value) for value in values]
    for a, key_a in zip(values, keys, strict=True):
        for b, key_b in zip(values, keys, strict=True):
            assert (key_a < key_b) == (a < b)
            assert (key_a == key_b) == (a == b)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(KINDS), st.integers(1, 30000), st.integers(1, 2048), seeds)
def test_gate(kind: str, n: int, k: int, seed: int) -> None:
    row = make_row(kind, n, np.random.default_rng(seed))
    selection, fullest, _ = cuda_host.gate(row, k, seed)
    assert 0 <= fullest <= cuda_host.constant("gate.list_capacity")
    np.testing.assert_array_equal(selection, oracle(row, k))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [2047, 2048, 2049, 8191, 8192, 8193, 131072, 131073, 300_001])
def test_long_rows(kind: str, n: int, seed: int) -> None:
    row = make_row(kind, n, np.random.default_rng(seed))
    expected = oracle(row, 2048)
    selection, fullest, _ = cuda_host.gate(row, 2048, seed)
    assert fullest >= 0
    np.testing.assert_array_equal(selection, expected)


def test_a_million_tokens(seed: int) -> None:
    row = make_row("normal", 1 << 20, np.random.default_rng(seed))
    expected = oracle(row, 2048)
    np.testing.assert_array_equal(cuda_host.gate(row, 2048, seed)[0], expected)


def test_the_gate_lists_few_entries_even_of_a_sorted_row() -> None:
    """Every prefix of the pages' order is a sample: the list gets about k(1 + ln(n / k))."""
    n, k = 200_000, 2048
    row = make_row("ascending", n, np.random.default_rng(1))
    _, _, entries = cuda_host.gate(row, k, 1)
    expected = k * (1 + np.log(n / k))
    assert entries < 2 * expected


def test_the_certificate_holds_in_any_order_of_pages() -> None:
    """The best pages first, last or anywhere; the sooner they come, the less is listed."""
    random, pages, k = np.random.default_rng(3), 2000, 2048
    row = make_row("normal", 64 * pages, random)
    row += np.repeat((random.random(pages) < 0.05).astype(np.float32) * 3, 64)
    best = oracle(row, k)
    good = np.argsort(-np.bincount(best // 64, minlength=pages), kind="stable").astype(np.int32)
    counts = {}
    orders = {"good": good, "bad": good[::-1].copy(), "random": random.permutation(good)}
    for name, order in orders.items():
        selection, fullest, counts[name] = cuda_host.gate(row, k, 1, order)
        assert 0 <= fullest <= cuda_host.constant("gate.list_capacity")
        np.testing.assert_array_equal(selection, best)
    assert counts["good"] < 0.8 * counts["random"] < counts["bad"]
    assert counts["good"] < 4096 + 2 * k


def test_bins_order_as_the_floats_do() -> None:
    """No float is below its bin's edge, and none of a higher bin below that of a lower one."""
    values = [make_row(kind, 3000, np.random.default_rng(4)) for kind in KINDS]
    edges = [0.0, 1e-45, 2.0**-41, 2.0**-40, 2.0**23, 2.0**24, 3e38, np.inf]
    signed = np.float32([*edges, *(-edge for edge in edges)])
    row = np.sort(np.concatenate([*values, signed, np.nextafter(signed, np.float32(0))]) + 0.0)
    bins = np.array([cuda_host.gate_bin(float(value)) for value in row])
    floors = np.array([cuda_host.gate_edge(int(number)) for number in bins])
    assert (np.diff(bins) >= 0).all()
    assert (floors <= row).all()
    assert bins.min() >= 0
    assert bins.max() < cuda_host.constant("gate.bins")
    ordinary = (abs(row) > 2.0**-39) & (abs(row) < 2.0**23)
    assert (row - floors)[ordinary].max() > 0
    assert (abs(row - floors) <= abs(row) / 8)[ordinary].all(), "16 bins an octave"


def test_nan_ends_in_bounds() -> None:
    row = make_row("normal", 20000, np.random.default_rng(2))
    row[::7] = np.nan
    selection = cuda_host.gate(row, 2048, 3)[0]
    assert ((selection >= -1) & (selection < len(row))).all()


@settings(deadline=None)
@given(st.integers(1, 2000), st.integers(1, 16_384), st.sampled_from([132, 264, 396]))
def test_keys_are_split_so_that_rounds_are_full(tiles: int, pages: int, resident: int) -> None:
    """No split is better that leaves a block eight pages and takes at most four rounds."""

    def full(splits: int) -> float:
        return tiles * splits / (-(-tiles * splits // resident) * resident)

    splits = cuda_host.split_count(tiles, pages, resident)
    allowed = [s for s in range(1, -(-pages // 8) + 1) if s == 1 or tiles * s <= 4 * resident]
    assert splits in allowed
    assert full(splits) == max(map(full, allowed))


# -- from the math warps to the gate ---------------------------------------------------------------


def lane_sees(rows: int, lane: int) -> list[tuple[int, int, int]]:
    """(row, key, place) of each of a page's logits that a gate lane looks at."""
    row, key, place = c_int(), c_int(), c_int()
    where = byref(row), byref(key), byref(place)
    entries, i = [], 0
    while i < cuda_host.host().check_gate_share(rows, lane, i, *where):
        entries.append((row.value, key.value, place.value))
        i += 1
    return entries


@pytest.mark.parametrize("rows", [4, 8])
def test_every_logit_of_a_page_reaches_one_gate_lane(rows: int) -> None:
    """The math warps put it there; a lane's are of one row, in quads that lie together."""
    lanes = [lane_sees(rows, lane) for lane in range(32)]
    assert sorted((row, key) for lane in lanes for row, key, _ in lane) == [
        (row, key) for row in range(rows) for key in range(64)
    ]
    for lane in lanes:
        assert len({row for row, _, _ in lane}) == 1
        assert all(
            place == cuda_host.host().check_score_place(rows, row, key) for row, key, place in lane
        )
        for quad in range(0, len(lane), 4):
            places = [place for _, _, place in lane[quad : quad + 4]]
            assert places == list(range(places[0], places[0] + 4))
            assert places[0] % 4 == 0


@pytest.mark.parametrize("rows", [4, 8])
def test_no_bank_is_asked_twice(rows: int) -> None:
    """Writes of two floats by 16 lanes at a time (one, by 32), reads of four by 8."""
    half = rows // 2
    for first in (0, half):
        for warp in range(4):
            places = []
            for lane in range(32):
                bits = (lane & 1) * (2 if half == 4 else 1) + (lane >> 1 & 1) * (half == 4)
                key = 16 * warp + lane // 4 + (0 if half == 4 else 8 * (lane >> 1 & 1))
                places.append(cuda_host.host().check_score_place(rows, first + bits, key))
            together, width = (16, 2) if half == 4 else (32, 1)
            for begin in range(0, 32, together):
                part = places[begin : begin + together]
                banks = [(place + i) % 32 for place in part for i in range(width)]
                assert len(set(banks)) == 32
    for begin in range(0, 32, 8):
        lanes = [lane_sees(rows, lane) for lane in range(begin, begin + 8)]
        for quad in range(0, len(lanes[0]), 4):
            banks = {place % 32 for lane in lanes for _, _, place in lane[quad : quad + 4]}
            assert len(banks) == 32


@pytest.mark.parametrize("rows", [4, 8])
def test_keys_beyond_a_row_s_end_do_not_pass(rows: int) -> None:
    for lane in range(32):
        for end in (-70, 0, 1, 7, 8, 9, 23, 40, 63, 64, 1000):
            expected = sum(
                1 << i for i, (_, key, _) in enumerate(lane_sees(rows, lane)) if key < end
            )
            assert cuda_host.host().check_below(rows, lane, end) == expected
