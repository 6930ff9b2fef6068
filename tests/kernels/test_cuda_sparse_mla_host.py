"""Division of sparse MLA's work (csrc/sparse_mla/pack.h, config.h), on the host."""

import ctypes
from ctypes import c_int, c_uint64

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from sglang_indexcache.kernels.sparse_mla import cuda as sparse_mla
from tests.kernels import cuda_host
from tests.kernels.cuda_host import host, pointer

pytestmark = pytest.mark.csrc


def pack(slots: NDArray, seed: int) -> tuple[NDArray, NDArray]:
    rows, k = slots.shape
    packed = np.full(rows * k, -7, dtype=np.int32)
    masks = np.full(rows * k, 0xEE, dtype=np.uint8)
    count = host().check_pack(
        pointer(slots), c_int(rows), c_int(k), c_uint64(seed), pointer(packed), pointer(masks)
    )
    return packed[:count], masks[:count]


def neighbours(
    random: np.random.Generator, rows: int, k: int, pool: int, first_slot: int
) -> NDArray:
    """Lists that share most of their slots, padded at the end."""
    slots = np.full((rows, k), -1, dtype=np.int32)
    for row in range(rows):
        n = int(random.integers(0, k + 1))
        slots[row, :n] = random.permutation(pool)[:n] + first_slot
    return slots


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.integers(1, 300), st.integers(0, 10**6), st.integers(0, 2**31))
def test_every_row_finds_its_list_in_the_union(rows: int, k: int, base: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    slots = neighbours(random, rows, k, pool=k + int(random.integers(0, k + 1)), first_slot=base)
    packed, masks = pack(slots, seed)
    assert len(np.unique(packed)) == len(packed), "no slot is gathered twice"
    assert ((masks >= 1) & (masks < 1 << rows)).all()
    for row in range(rows):
        slots_of_row = packed[masks >> row & 1 == 1]
        np.testing.assert_array_equal(np.sort(slots_of_row), np.sort(slots[row][slots[row] >= 0]))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 8), st.integers(2, 100), st.integers(0, 2**31))
def test_repeated_slots_count_as_often_as_they_occur(rows: int, k: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    slots = random.integers(0, k, (rows, k)).astype(np.int32)
    slots[0, 1] = slots[0, 0]
    packed, masks = pack(slots, seed)
    for row in range(rows):
        slots_of_row = packed[masks >> row & 1 == 1]
        np.testing.assert_array_equal(np.sort(slots_of_row), np.sort(slots[row]))


def test_the_union_does_not_depend_on_the_order_of_execution(
    random: np.random.Generator,
) -> None:
    slots = neighbours(random, 8, 2048, pool=2600, first_slot=10**7)
    first = pack(slots, 1)
    for seed in range(2, 6):
        again = pack(slots, seed)
        np.testing.assert_array_equal(first[0], again[0])
        np.testing.assert_array_equal(first[1], again[1])


def test_disjoint_lists_fill_the_scratch(random: np.random.Generator) -> None:
    rows, k = cuda_host.constant("mla.max_packed_rows"), 2048
    slots = random.permutation(rows * k).astype(np.int32).reshape(rows, k)
    packed, masks = pack(slots, 1)
    np.testing.assert_array_equal(packed, slots.reshape(-1))
    np.testing.assert_array_equal(masks, np.repeat(1 << np.arange(rows), k))


@pytest.mark.parametrize("heads", range(1, 129))
def test_every_head_of_every_row_has_one_place(heads: int) -> None:
    """Tiles as exports.cu lays them out, for the packings that Python may choose."""
    per_block = host().check_heads_per_block(c_int(heads))
    blocks = host().check_head_blocks(c_int(heads))
    assert per_block == sparse_mla.heads_per_block(heads)
    assert blocks == sparse_mla.head_blocks(heads)
    rows = 11
    for packed in range(1, min(64 // per_block, sparse_mla.MAX_PACKED_ROWS) + 1):
        places = set()
        for first in range(0, rows, packed):
            for block in range(blocks):
                in_tile, first_head = min(packed, rows - first), block * per_block
                in_block = min(per_block, heads - first_head)
                for m in range(64):
                    query, head = c_int(), c_int()
                    bit = host().check_tile_row(
                        c_int(first),
                        c_int(in_tile),
                        c_int(first_head),
                        c_int(in_block),
                        c_int(m),
                        ctypes.byref(query),
                        ctypes.byref(head),
                    )
                    if query.value < 0:
                        assert bit == 8, "a row without a head must never be selected"
                        continue
                    assert bit == query.value - first
                    assert (query.value, head.value) not in places
                    places.add((query.value, head.value))
        assert places == {(query, head) for query in range(rows) for head in range(heads)}


@settings(deadline=None)
@given(st.integers(0, 200), st.integers(1, 16))
def test_splits_cover_every_step(steps: int, splits: int) -> None:
    edges = [
        host().check_split_begin(c_int(steps), c_int(rank), c_int(splits))
        for rank in range(splits + 1)
    ]
    assert edges[0] == 0
    assert edges[-1] == steps
    lengths = np.diff(edges)
    assert lengths.min() >= 0
    assert lengths.max() - lengths.min() <= 1


def test_python_and_cuda_state_the_same_limits() -> None:
    from sglang_indexcache.kernels.indexer import cuda as indexer

    assert cuda_host.constant("gate.list_capacity") == indexer.LIST_CAPACITY
    assert cuda_host.constant("mla.rows") == sparse_mla.TILE_ROWS
    assert cuda_host.constant("mla.keys") == sparse_mla.TILE_KEYS
    assert cuda_host.constant("mla.max_cluster") == sparse_mla.MAX_CLUSTER
    assert cuda_host.constant("mla.max_packed_rows") == sparse_mla.MAX_PACKED_ROWS
    assert cuda_host.constant("mla.max_packed_slots") == sparse_mla.MAX_PACKED_SLOTS


@settings(deadline=None)
@given(st.integers(1, 100_000), st.integers(1, 128), st.integers(1, 4096), st.integers(1, 200))
def test_choices_stay_within_the_kernels_limits(rows: int, heads: int, k: int, sms: int) -> None:
    packed = sparse_mla.rows_per_tile(rows, heads, k, sms)
    assert 1 <= packed <= sparse_mla.MAX_PACKED_ROWS
    assert packed * sparse_mla.heads_per_block(heads) <= sparse_mla.TILE_ROWS
    assert packed == 1 or packed * k <= sparse_mla.MAX_PACKED_SLOTS
    splits = sparse_mla.cluster_size(rows, heads, k, lambda size: sms // size)
    assert 1 <= splits <= min(16, -(-k // sparse_mla.TILE_KEYS))
    assert splits == 1 or splits * rows * sparse_mla.head_blocks(heads) <= sms


def test_decode_splits_and_prefill_packs() -> None:
    packed = {heads: sparse_mla.rows_per_tile(8192, heads, 2048, 132) for heads in (8, 16, 20, 64)}
    assert packed == {8: 8, 16: 4, 20: 3, 64: 1}
    assert sparse_mla.rows_per_tile(64, 20, 2048, 132) == 1
    assert sparse_mla.cluster_size(1, 20, 64, lambda size: 132 // size) == 1


@pytest.mark.parametrize(
    ("rows", "splits"),
    [
        (1, 16),
        (7, 16),
        (8, 11),
        (9, 8),
        (15, 8),
        (16, 7),
        (20, 5),
        (31, 4),
        (32, 3),
        (64, 2),
        (67, 1),
    ],
)
def test_a_cluster_is_as_large_as_the_driver_has_room_for(rows: int, splits: int) -> None:
    """An H100 has 132 SMs, of which clusters of 8 take 120, since they must lie in one GPC."""
    gpcs = (18, 18, 18, 16, 16, 16, 16, 14)
    assert sparse_mla.cluster_size(rows, 20, 2048, lambda n: sum(g // n for g in gpcs)) == splits
    assert sparse_mla.cluster_size(rows, 20, 2048, lambda n: 0) == 1, "no clusters at all"
    assert sparse_mla.cluster_size(67, 20, 2048, lambda n: sum(g // n for g in gpcs)) == 1
