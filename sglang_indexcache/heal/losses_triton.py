"""The gathered sparse loss in Triton: what :mod:`~sglang_indexcache.heal.losses` computes.

One program has one query, and its k selected keys lie in registers as vectors of length k: keys are
read where they are, and neither gathered copies nor scores are written. What the heads pull at
each key is the only scratch, ``[B, block, H, k]`` float32.

Everything is float32, products too. Key gradients are added up by atomics, so their last bits
differ from run to run. Opt-in (``triton=True``): no card has shown it faster yet.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_indexcache.errors import TrainingError

TILE = 32768
"""Numbers of keys that a program holds at a time: all k, and so much of their width."""
KEYS, COLUMNS = 64, 64
"""Tile of the products that give gradients."""
MIN_DOT = 16
"""The smallest side of a product."""


def check(tensors: dict[str, torch.Tensor]) -> None:
    """Refuse what the kernels do not take, before anything runs.

    Args:
        tensors: inputs by the name that an error gives them.

    Raises:
        TrainingError: float64, or tensors on a CPU that Triton does not interpret for.
    """
    for name, tensor in tensors.items():
        if tensor.dtype == torch.float64:
            raise TrainingError(
                f"the Triton form of the loss computes in float32, and {name} are float64. Leave "
                "triton=True out."
            )
        if tensor.device.type == "cpu" and not triton.knobs.runtime.interpret:
            raise TrainingError(
                f"the Triton form of the loss needs a GPU, and {name} are on the CPU. Leave "
                "triton=True out, or set TRITON_INTERPRET=1 to test it."
            )


def add_attention(
    p: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, places: torch.Tensor, scale: float
) -> None:
    """Add one target's attention over the chosen keys, averaged over its heads.

    Args:
        p: ``[B, rows, k]`` float32, added to; times the number of targets.
        queries: ``[B, N, rows, d]``.
        keys: ``[B, N or a divisor, T, d]``.
        places: ``[B, rows, k]`` int32, -1 where nothing is chosen.
        scale: multiplies the dot products.
    """
    queries, keys = _rows_in_memory(queries), _rows_in_memory(keys)
    batch, heads, rows, width = queries.shape
    chosen = places.shape[-1]
    _attention[(batch, rows)](
        queries,
        keys,
        places,
        p,
        scale,
        heads,
        heads // keys.shape[1],
        rows,
        chosen,
        *queries.stride()[:3],
        *keys.stride()[:3],
        WIDTH=width,
        **_tile(chosen, width),
        num_warps=8,
    )


def divergence(
    queries: torch.Tensor,
    keys: torch.Tensor,
    weights: torch.Tensor,
    p: torch.Tensor,
    places: torch.Tensor,
    counted: torch.Tensor,
    gradient: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """KL(p || q) of every query, and its gradient if wanted.

    Args:
        queries: of the indexer, ``[B, rows, H, D]``.
        keys: ``[B, T, D]``.
        weights: ``[B, rows, H]``.
        p: ``[B, rows, k]`` float32.
        places: ``[B, rows, k]`` int32, -1 where nothing is chosen.
        counted: ``[B, rows]`` bool; other queries have no loss.
        gradient: of queries (``[B, rows, H, D]``), keys (``[B, T, D]`` float32, added to) and
            weights (``[B, rows, H]``).

    Returns:
        ``[B, rows]`` float32.
    """
    queries, keys, weights = map(_rows_in_memory, (queries, keys, weights))
    batch, rows, heads, width = queries.shape
    chosen = places.shape[-1]
    loss = torch.empty(batch, rows, device=keys.device)
    pulls = torch.empty(batch, rows, heads, chosen if gradient else 0, device=keys.device)
    of_weights = torch.empty(batch, rows, heads, device=keys.device)
    _divergence[(batch, rows)](
        queries,
        keys,
        weights,
        p,
        places,
        counted.to(torch.float32),
        loss,
        pulls,
        of_weights,
        heads,
        rows,
        chosen,
        *queries.stride()[:3],
        *keys.stride()[:2],
        *weights.stride()[:2],
        WIDTH=width,
        **_tile(chosen, width),
        GRADIENT=gradient is not None,
        num_warps=8,
    )
    if gradient is not None:
        of_queries = torch.empty(batch, rows, heads, width, device=keys.device)
        _take_back[(batch, rows, triton.cdiv(width, COLUMNS))](
            queries,
            keys,
            places,
            pulls,
            of_queries,
            gradient[1],
            heads,
            rows,
            chosen,
            *queries.stride()[:3],
            *keys.stride()[:2],
            *gradient[1].stride()[:2],
            WIDTH=width,
            HEADS=max(MIN_DOT, triton.next_power_of_2(heads)),
            KEYS=KEYS,
            COLUMNS=COLUMNS,
            num_warps=4,
        )
        gradient[0].copy_(of_queries)
        gradient[2].copy_(of_weights)
    return loss


def _tile(chosen: int, width: int) -> dict[str, int]:
    """How many keys, and columns of them, a program holds."""
    keys = triton.next_power_of_2(chosen)
    return {"BLOCK": keys, "CHUNK": min(max(TILE // keys, 16), triton.next_power_of_2(width))}


def _rows_in_memory(x: torch.Tensor) -> torch.Tensor:
    """``x`` with its last dimension contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


@triton.jit
def _dots(query, keys, place, seen, key_stride, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """``[BLOCK]`` products of a query and the keys at ``place``, 0 where none is seen."""
    products = tl.zeros_like(place).to(tl.float32)
    for start in range(0, WIDTH, CHUNK):
        column = start + tl.arange(0, CHUNK)
        inside = column < WIDTH
        one = tl.load(query + column, mask=inside, other=0.0).to(tl.float32)
        tile = tl.load(
            keys + place[:, None] * key_stride + column[None, :],
            mask=seen[:, None] & inside[None, :],
            other=0.0,
        ).to(tl.float32)
        products += tl.sum(tile * one[None, :], axis=1)
    return products


@triton.jit
def _chosen(places, row, chosen, BLOCK: tl.constexpr):
    """Where each of a query's keys lies, and whether there is one."""
    at = tl.arange(0, BLOCK)
    place = tl.load(places + row * chosen + at, mask=at < chosen, other=-1).to(tl.int64)
    return at, tl.maximum(place, 0), place >= 0


@triton.jit
def _attention(
    queries,
    keys,
    places,
    p,
    scale,
    heads,
    group,
    rows,
    chosen,
    query_batch,
    query_head,
    query_row,
    key_batch,
    key_head,
    key_row,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    batch, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    at, place, seen = _chosen(places, batch * rows + row, chosen, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for head in range(heads):
        query = queries + batch * query_batch + head * query_head + row * query_row
        key = keys + batch * key_batch + (head // group) * key_head
        scores = _dots(query, key, place, seen, key_row, WIDTH, CHUNK) * scale
        scores = tl.where(seen, scores, float("-inf"))
        highest = tl.max(scores, axis=0)
        # Nothing to attend to: no probability, and not NaN.
        powers = tl.exp(scores - tl.where(highest == float("-inf"), 0.0, highest))
        total += powers / tl.maximum(tl.sum(powers, axis=0), 1e-30)
    here = p + (batch * rows + row) * chosen + at
    before = tl.load(here, mask=at < chosen, other=0.0)
    tl.store(here, before + total / heads, mask=at < chosen)


@triton.jit
def _divergence(
    queries,
    keys,
    weights,
    p,
    places,
    counted,
    loss,
    pulls,
    of_weights,
    heads,
    rows,
    chosen,
    query_batch,
    query_row,
    query_head,
    key_batch,
    key_row,
    weight_batch,
    weight_row,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    GRADIENT: tl.constexpr,
):
    batch, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    number = batch * rows + row
    at, place, seen = _chosen(places, number, chosen, BLOCK)
    query = queries + batch * query_batch + row * query_row
    key = keys + batch * key_batch
    weight = weights + batch * weight_batch + row * weight_row
    scores = tl.zeros([BLOCK], tl.float32)
    for head in range(heads):
        dots = _dots(query + head * query_head, key, place, seen, key_row, WIDTH, CHUNK)
        scores += tl.load(weight + head).to(tl.float32) * tl.maximum(dots, 0.0)
    scores = tl.where(seen, scores, float("-inf"))
    highest = tl.max(scores, axis=0)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    powers = tl.exp(scores - highest)
    total = tl.maximum(tl.sum(powers, axis=0), 1e-30)
    target = tl.load(p + number * chosen + at, mask=at < chosen, other=0.0)
    # 0 log 0 and 0 log q are 0, also where log q is -inf.
    some = target > 0
    log_q = tl.where(some, scores - highest - tl.log(total), 0.0)
    terms = tl.where(some, target * (tl.log(tl.where(some, target, 1.0)) - log_q), 0.0)
    counts = tl.load(counted + number)
    tl.store(loss + number, tl.where(counts > 0, tl.sum(terms, axis=0), 0.0))
    if GRADIENT:
        pull = (powers / total - target) * counts  # of the loss on the scores
        for head in range(heads):
            dots = _dots(query + head * query_head, key, place, seen, key_row, WIDTH, CHUNK)
            hits = tl.maximum(dots, 0.0)
            tl.store(of_weights + number * heads + head, tl.sum(hits * pull, axis=0))
            on_dots = tl.where(dots > 0, tl.load(weight + head).to(tl.float32) * pull, 0.0)
            tl.store(pulls + (number * heads + head) * chosen + at, on_dots, mask=at < chosen)


@triton.jit
def _take_back(
    queries,
    keys,
    places,
    pulls,
    of_queries,
    of_keys,
    heads,
    rows,
    chosen,
    query_batch,
    query_row,
    query_head,
    key_batch,
    key_row,
    sum_batch,
    sum_row,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """From what each head pulls at each key to the gradients of queries and keys."""
    batch, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    number = batch * rows + row
    head = tl.arange(0, HEADS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    used = (head < heads)[:, None] & (column < WIDTH)[None, :]
    query = tl.load(
        queries
        + batch * query_batch
        + row * query_row
        + head[:, None] * query_head
        + column[None, :],
        mask=used,
        other=0.0,
    ).to(tl.float32)
    total = tl.zeros([HEADS, COLUMNS], tl.float32)
    for start in range(0, chosen, KEYS):
        at = start + tl.arange(0, KEYS)
        place = tl.load(places + number * chosen + at, mask=at < chosen, other=-1).to(tl.int64)
        seen = (place >= 0)[:, None] & (column < WIDTH)[None, :]
        where = tl.maximum(place, 0)[:, None]
        tile = tl.load(
            keys + batch * key_batch + where * key_row + column[None, :], mask=seen, other=0.0
        ).to(tl.float32)
        pull = tl.load(
            pulls + (number * heads + head[:, None]) * chosen + at[None, :],
            mask=(head < heads)[:, None] & (at < chosen)[None, :],
            other=0.0,
        )
        total += tl.dot(pull, tile, input_precision="ieee")
        found = tl.dot(tl.trans(pull), query, input_precision="ieee")
        tl.atomic_add(
            of_keys + batch * sum_batch + where * sum_row + column[None, :], found, mask=seen
        )
    tl.store(
        of_queries + (number * heads + head[:, None]) * WIDTH + column[None, :], total, mask=used
    )
