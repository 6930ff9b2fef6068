"""Sums over heads and the order of pages (indexer/reduce.h, indexer/schedule.h), on the host.

Where bytes lie in swizzled tiles, descriptors and fragments (common/layout.h), the emulated GPU
finds wrong: it reads them by the PTX ISA (test_cuda_emulated.py).
"""

from ctypes import c_int, c_int64

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from sglang_indexcache.kernels.contract import MAX_PAGES
from tests.kernels import cuda_host
from tests.kernels.cuda_host import host, pointer

pytestmark = pytest.mark.csrc

# -- sums over the heads -------------------------------------------------------------------------

TILES = [(8, 4), (8, 8), (16, 4), (16, 8), (32, 1), (32, 2), (32, 4), (32, 8)]
TILES += [(64, 1), (64, 2), (64, 4)]


def fma(a: NDArray, b: NDArray, c: NDArray) -> NDArray:
    """Float32 fused multiply-add: the product of two float32 is exact in float64.

    The sum then rounds twice; long double leaves no room for a double rounding at random inputs.
    """
    exact = a.astype(np.longdouble) * b.astype(np.longdouble) + c.astype(np.longdouble)
    return exact.astype(np.float32)


@pytest.mark.parametrize(("heads", "rows"), TILES)
def test_sums_are_in_the_contracts_order(
    heads: int, rows: int, random: np.random.Generator
) -> None:
    """Bit for bit the order that contract.py states, each sum made by one lane."""
    products = random.standard_normal((64, rows * heads)).astype(np.float32)
    gates = random.standard_normal(rows * heads).astype(np.float32)
    sums = np.full((64, rows), np.nan, dtype=np.float32)
    writers = np.zeros((64, rows), dtype=np.int32)
    flags = host().check_sum_heads(
        c_int(heads),
        c_int(rows),
        pointer(products),
        pointer(gates),
        pointer(sums),
        pointer(writers),
    )
    assert flags & 0xFF
    assert (writers == 1).all()
    for row in range(rows):
        part = [np.zeros(64, dtype=np.float32) for _ in range(4)]
        for head in range(heads):
            lane, column = head // 2 % 4, row * heads + head
            dots = np.maximum(products[:, column], np.float32(0))
            part[lane] = fma(np.full(64, gates[column]), dots, part[lane])
        np.testing.assert_array_equal(sums[:, row], (part[0] + part[1]) + (part[2] + part[3]))


# -- schedule ------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(st.integers(0, 20), max_size=12), st.integers(0, 10), st.sampled_from([1, 4, 8]))
def test_segments_cover_every_row_once(lens: list[int], padding: int, tile_rows: int) -> None:
    starts = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
    rows = int(starts[-1]) + padding
    request_of = np.full(max(rows, 1), -9, dtype=np.int32)
    end_of = np.full(max(rows, 1), -9, dtype=np.int32)
    host().check_segments(
        pointer(starts),
        c_int(len(lens)),
        c_int(rows),
        c_int(tile_rows),
        pointer(request_of),
        pointer(end_of),
    )
    expected = np.concatenate([np.repeat(np.arange(len(lens)), lens), np.full(padding, -1)])
    np.testing.assert_array_equal(request_of[:rows], expected)
    for row in range(rows):
        end = int(end_of[row])
        assert row < end <= min(rows, (row // tile_rows + 1) * tile_rows)
        assert (expected[row:end] == expected[row]).all()


@settings(deadline=None)
@given(st.lists(st.integers(0, 1 << 20), min_size=1, max_size=8), st.integers(0, 2048))
def test_pages_of_a_segment(visible: list[int], trivial: int) -> None:
    array = np.array(visible, dtype=np.int32)
    most = max((v for v in visible if v > trivial), default=0)
    answer = host().check_pages_of(pointer(array), c_int(len(visible)), c_int(trivial))
    assert answer == -(-most // 64)


def test_the_host_lets_through_what_the_order_of_pages_can_count() -> None:
    """Their product wraps from 65 537 pages on, and pages were visited twice or never."""
    assert cuda_host.constant("indexer.max_pages") == MAX_PAGES
    assert (MAX_PAGES - 1) ** 2 < 1 << 32


@settings(deadline=None)
@given(st.one_of(st.integers(1, 1 << 14), st.integers(MAX_PAGES - 3, MAX_PAGES)))
def test_every_page_is_visited_once_and_evenly(pages: int) -> None:
    order = np.empty(pages, dtype=np.int32)
    host().check_page_order(c_int(pages), pointer(order))
    assert (np.sort(order) == np.arange(pages)).all()
    if pages >= 256:  # any 64 pages in a row of the order leave no eighth of the row unseen
        window = order[:64] * 8 // pages
        assert len(np.unique(window)) == 8


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(1, 9), st.integers(0, 3), st.data())
def test_slots(requests: int, width: int, gap: int, data: st.DataObject) -> None:
    table = np.arange(requests * (width + gap), dtype=np.int32)[::-1].copy()
    request = data.draw(st.integers(0, requests - 1))
    position = data.draw(st.integers(0, width * 64 - 1))
    answer = host().check_slot(
        pointer(table), c_int64(width + gap), c_int(request), c_int(position)
    )
    page = table[request * (width + gap) + position // 64]
    assert answer == page * 64 + position % 64
