"""Places of bytes (csrc/common/layout.h, indexer/reduce.h, indexer/schedule.h), on the host.

A model of TMA's swizzle and of how WGMMA addresses its operands, written from the PTX ISA and from
nothing in ``csrc/``, multiplies whole tiles from the descriptors that the kernels build.
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

# -- the model ---------------------------------------------------------------------------------

# PTX ISA "Tensor swizzling modes", 128B: within every 1024 bytes, address bits 4-6 are exclusive-or
# combined with bits 7-9.


def swizzled(address: int) -> int:
    return address ^ ((address >> 7 & 7) << 4)


def store_tile(memory: NDArray, base: int, tile: NDArray) -> None:
    """Write a box of rows of 128 bytes as TMA does."""
    assert base % 1024 == 0
    assert tile.shape[1] == 128
    for row, content in enumerate(tile):
        for byte in range(0, 128, 16):
            at = swizzled(base + row * 128 + byte)
            memory[at : at + 16] = content[byte : byte + 16]


class Descriptor:
    """PTX ISA "Matrix Descriptor Format"."""

    def __init__(self, bits: int) -> None:
        self.start = (bits & 0x3FFF) << 4
        self.leading = (bits >> 16 & 0x3FFF) << 4
        self.stride = (bits >> 32 & 0x3FFF) << 4
        self.base_offset = bits >> 49 & 7
        self.mode = bits >> 62
        assert self.mode == 1, "128-byte swizzle"
        assert self.base_offset == 0, "tiles begin at multiples of 1024"

    def k_major(self, memory: NDArray, rows: int, k_bytes: int) -> NDArray:
        """Core matrices of 8 rows x 16 bytes, rows 128 bytes apart; groups of 8 rows a stride."""
        tile = np.empty((rows, k_bytes), dtype=np.uint8)
        for row in range(rows):
            for byte in range(0, k_bytes, 16):
                at = self.start + row // 8 * self.stride + row % 8 * 128 + byte
                at = swizzled(at)
                tile[row, byte : byte + 16] = memory[at : at + 16]
        return tile

    def mn_major_bf16(self, memory: NDArray, columns: int, k: int) -> NDArray:
        """``[k, columns]`` of 2-byte elements; 64 columns contiguous, then a leading offset."""
        tile = np.empty((k, columns), dtype=np.uint16)
        for row in range(k):
            for column in range(0, columns, 8):
                at = self.start + column // 64 * self.leading
                at += row // 8 * self.stride + row % 8 * 128 + column % 64 * 2
                at = swizzled(at)
                tile[row, column : column + 8] = memory[at : at + 16].view(np.uint16)
        return tile


def bf16(bits: NDArray) -> NDArray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def small_bf16(random: np.random.Generator, *shape: int) -> NDArray:
    """Bits of small integers: products and sums are exact in float32."""
    values = random.integers(-8, 9, shape).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


# -- swizzle, descriptors, fragments ---------------------------------------------------------------


def test_swizzle_is_tmas() -> None:
    for row in range(64):
        for byte in range(128):
            address = host().check_swizzle128(c_int(row), c_int(byte))
            assert address == swizzled(row * 128 + byte)


def test_accumulators_cover_the_tile_as_the_isa_draws_it() -> None:
    """PTX ISA, "D of wgmma m64nNk", has row 16w + l/4 (+8) and columns 8j + 2(l%4) (+1)."""
    counts = np.zeros((64, 256), dtype=int)
    for thread in range(128):
        for i in range(128):
            row = host().check_accumulator_row(c_int(thread), c_int(i))
            column = host().check_accumulator_column(c_int(thread), c_int(i))
            warp, lane = divmod(thread, 32)
            assert row == 16 * warp + lane // 4 + 8 * (i % 4 // 2)
            assert column == 8 * (i // 4) + 2 * (lane % 4) + i % 2
            counts[row, column] += 1
    assert (counts == 1).all()


@pytest.mark.parametrize("columns", [32, 64, 128, 256])
def test_indexer_operands(columns: int, random: np.random.Generator) -> None:
    """Four K steps over a page of keys and a tile of queries, as pipeline.cuh issues them."""
    keys = random.integers(0, 256, (64, 128), dtype=np.uint8)
    queries = random.integers(0, 256, (columns, 128), dtype=np.uint8)
    memory = np.zeros(128 * 1024, dtype=np.uint8)
    key_base, query_base = 7 * 1024, 40 * 1024
    store_tile(memory, key_base, keys)
    store_tile(memory, query_base, queries)
    for byte in range(0, 128, 32):
        a = Descriptor(cuda_host.advance(cuda_host.k_major(key_base), byte))
        b = Descriptor(cuda_host.advance(cuda_host.k_major(query_base), byte))
        step = slice(byte, byte + 32)
        np.testing.assert_array_equal(a.k_major(memory, 64, 32), keys[:, step])
        np.testing.assert_array_equal(b.k_major(memory, columns, 32), queries[:, step])


def test_mla_tile(random: np.random.Generator) -> None:
    """S = Q K^T and O = P V of one step, from the offsets that products.cuh uses."""
    tile_bytes = cuda_host.constant("mla.tile_bytes")
    q, keys = small_bf16(random, 64, 576), small_bf16(random, 64, 576)
    probabilities = small_bf16(random, 64, 64)
    memory = np.zeros(1 << 18, dtype=np.uint8)
    q_base, key_base, p_base = 1024, 80 * 1024, 160 * 1024
    for base, matrix in ((q_base, q), (key_base, keys), (p_base, probabilities)):
        for tile in range(matrix.shape[1] // 64):
            part = np.ascontiguousarray(matrix[:, tile * 64 : tile * 64 + 64]).view(np.uint8)
            store_tile(memory, base + tile * tile_bytes, part)

    for group in range(2):  # math warpgroups
        scores = np.zeros((64, 32), dtype=np.float32)
        a = cuda_host.k_major(q_base)
        b = cuda_host.k_major(key_base + group * 32 * 128)
        for tile in range(9):
            for byte in range(0, 128, 32):
                offset = tile * tile_bytes + byte
                left = Descriptor(cuda_host.advance(a, offset)).k_major(memory, 64, 32)
                right = Descriptor(cuda_host.advance(b, offset)).k_major(memory, 32, 32)
                scores += bf16(left.view(np.uint16)) @ bf16(right.view(np.uint16)).T
        np.testing.assert_array_equal(scores, bf16(q) @ bf16(keys[group * 32 : group * 32 + 32]).T)

        out = np.zeros((64, 256), dtype=np.float32)
        a = cuda_host.k_major(p_base)
        b = cuda_host.mn_major(key_base + group * 4 * tile_bytes, tile_bytes)
        for k in range(4):
            left = Descriptor(cuda_host.advance(a, 32 * k)).k_major(memory, 64, 32)
            right = Descriptor(cuda_host.advance(b, 16 * 128 * k)).mn_major_bf16(memory, 256, 16)
            out += bf16(left.view(np.uint16)) @ bf16(right)
        values = keys[:, group * 256 : group * 256 + 256]
        np.testing.assert_array_equal(out, bf16(probabilities) @ bf16(values))


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
