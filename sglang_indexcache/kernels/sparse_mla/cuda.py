"""Sparse MLA on Hopper (csrc/sparse_mla): any head count from 1 to 128, bfloat16 or FP8 cache.

The tensor cores work on tiles of 64 rows. If there are enough query rows to fill the GPU,
neighbouring rows share a tile, and one gather of the union of their lists: eight rows of 8 heads,
four of 16, three of 20. If there are few (decode), a row has a tile to itself and its list is split
over the blocks of a cluster, which combine their results inside the launch.
"""

from collections.abc import Callable
from functools import cache as cache_results
from functools import partial

import torch

from sglang_indexcache.kernels.build import constant, library
from sglang_indexcache.kernels.checks import check_sparse_mla, output, require_aligned
from sglang_indexcache.kernels.contract import (
    FP8_ROW_BYTES,
    LATENT_DIM,
    VALUE_DIM,
    WORKSPACE_BYTES,
    Kept,
)
from sglang_indexcache.kernels.dispatch import multiprocessors

CONFIG = "sparse_mla/config.h"
TILE_ROWS, TILE_KEYS = constant(CONFIG, "kRows"), constant(CONFIG, "kKeys")
MAX_CLUSTER = constant(CONFIG, "kMaxCluster")
MAX_PACKED_ROWS = constant(CONFIG, "kMaxQueries")
MAX_PACKED_SLOTS = constant("sparse_mla/pack.h", "kMaxPackedSlots")


def prepare() -> None:
    """Compile and load the library of the op below."""
    library("sparse_mla")


def sparse_mla(
    q: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
    *,
    sinks: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    kept: Kept | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:class:`sglang_indexcache.kernels.contract.SparseMLA`; ``kept`` holds the packed lists."""
    check_sparse_mla(q, cache, slots, sinks, lengths)
    rows, heads = q.shape[:2]
    out = output("sparse_mla", out, (rows, heads, VALUE_DIM), q.dtype, q.device)
    lse = output("sparse_mla", lse, (rows, heads), torch.float32, q.device)
    require_aligned("sparse_mla", q=q, out=out)
    packed = rows_per_tile(rows, heads, slots.shape[1], multiprocessors(q.device))
    if packed == 1:
        if rows:
            splits = cluster_size(
                rows,
                heads,
                slots.shape[1],
                partial(clusters_at_once, q.device, cache.dtype == torch.uint8),
            )
            library("sparse_mla").sparse_mla_attend(
                q, cache, slots, None, lengths, 1, scale, sinks, splits, out, lse
            )
        return out, lse
    at_once = packed * max(1, WORKSPACE_BYTES // (packed * slots.shape[1] * 5 + 4))
    if kept is None or rows > at_once:
        kept = {}
    for first in range(0, rows, at_once):
        part = slice(first, first + at_once)
        lists = kept.get(packed) or pack(slots[part], packed)
        if rows <= at_once:
            kept[packed] = lists
        library("sparse_mla").sparse_mla_attend(
            q[part], cache, *lists, packed, scale, sinks, 1, out[part], lse[part]
        )
    return out, lse


def pack(
    slots: torch.Tensor, rows_per_tile: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Merge the lists of each ``rows_per_tile`` neighbouring rows (csrc/sparse_mla/pack.h).

    Args:
        slots: ``[T, k]`` int32.

    Returns:
        ``[tiles, rows_per_tile * k]`` int32 slots, uint8 masks of the same shape (bit g: row g of
        the tile selected the slot), ``[tiles]`` int32 lengths; undefined beyond the lengths.
    """
    rows, k = slots.shape
    tiles = -(-rows // rows_per_tile)
    packed = torch.empty(tiles, rows_per_tile * k, dtype=torch.int32, device=slots.device)
    masks = torch.empty(tiles, rows_per_tile * k, dtype=torch.uint8, device=slots.device)
    counts = torch.empty(tiles, dtype=torch.int32, device=slots.device)
    library("sparse_mla").sparse_mla_pack(slots, rows_per_tile, packed, masks, counts)
    return packed, masks, counts


def rows_per_tile(rows: int, heads: int, k: int, sms: int) -> int:
    """Return how many query rows share a tile: as many as fit while every SM has two tiles."""
    fitting = min(TILE_ROWS // heads_per_block(heads), MAX_PACKED_ROWS, MAX_PACKED_SLOTS // k)
    enough = rows * head_blocks(heads) // (2 * sms)
    return max(1, min(fitting, enough))


def cluster_size(rows: int, heads: int, k: int, at_once: Callable[[int], int]) -> int:
    """Return how many blocks share a list so that the longest part is as short as possible.

    Args:
        at_once: returns how many clusters with a given number of blocks the GPU runs at once.
    """
    steps = -(-k // TILE_KEYS)
    sizes = range(min(MAX_CLUSTER, steps), 1, -1)
    most = next((size for size in sizes if rows * head_blocks(heads) <= at_once(size)), 1)
    return -(-steps // -(-steps // most))


@cache_results
def clusters_at_once(device: torch.device, fp8: bool, size: int) -> int:
    """Ask the driver how many clusters of the kernel for this cache format run at once.

    The number of SMs over ``size`` would be wrong: a cluster's SMs must be in one GPC, and GPCs
    differ in size.
    """
    row = torch.empty(0, FP8_ROW_BYTES if fp8 else LATENT_DIM, device=device)
    return int(library("sparse_mla").sparse_mla_clusters(row, size))


def head_blocks(heads: int) -> int:
    """Return the number of tiles for the heads of one query row (``head_blocks`` of config.h)."""
    return -(-heads // TILE_ROWS)


def heads_per_block(heads: int) -> int:
    """Return the number of heads in one tile (``heads_per_block`` of config.h)."""
    return -(-heads // head_blocks(heads))
