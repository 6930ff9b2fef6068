"""The lightning indexer in its most obvious form: one request, one row at a time.

The top-k of a logits matrix is an operation of its own, and the second half of a selection.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch

from sglang_indexcache.kernels.contract import INDEX_DIM, PADDING, PAGE_TOKENS, IndexerBatch
from sglang_indexcache.kernels.indexer.quantization import read_pages

FLOAT32_BITS = 23
HOPPER_FP8_BITS = 13
"""Bits that a matrix unit keeps below the leading one when it adds; see logits_tolerance."""


def logits_in_order(
    q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """Compute one request's logits in the order of float32 arithmetic that ``contract.py`` states.

    A dot product of e4m3 vectors is a sum of 128 integers times ``2^-18`` below ``2^44``: exact in
    float64 in any order, so every bit of the result depends on its row and key alone. A float64 sum
    rounded to float32 equals a fused multiply-add except in rare cases of double rounding.

    Args:
        q: ``[T, H, 128]`` and ``keys``: ``[S, 128]``, float8_e4m3fn.
        weights: ``[T, H]`` float32.
        scales: ``[S]`` float32.

    Returns:
        ``[T, S]`` float32.
    """
    dots = torch.einsum("thd,sd->hts", q.double(), keys.double()).float().relu_()
    parts = torch.zeros(4, *dots.shape[1:], device=q.device)
    for head, dot in enumerate(dots):
        lane = head // 2 % 4
        weight = weights[:, head, None].double()
        parts[lane] = (weight * dot.double() + parts[lane].double()).float()
    return ((parts[0] + parts[1]) + (parts[2] + parts[3])) * scales


def request_keys(
    pages: torch.Tensor, block_row: torch.Tensor, tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first ``tokens`` keys ``[tokens, 128]`` e4m3 and scales of one request."""
    return read_pages(pages, slots_of(torch.arange(tokens), block_row), INDEX_DIM)


def slots_of(positions: torch.Tensor, block_row: torch.Tensor) -> torch.Tensor:
    """Return the physical token slots of ``positions`` of one request; -1 stays -1."""
    positions = positions.to(block_row.device).long()
    page = block_row[positions.clamp_min(0) // PAGE_TOKENS].long()
    return torch.where(positions < 0, PADDING, page * PAGE_TOKENS + positions % PAGE_TOKENS)


def logits(batch: IndexerBatch, width: int, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """:class:`~sglang_indexcache.kernels.contract.Logits`."""
    if out is None:
        out = torch.full((len(batch.q), width), float("nan"), device=batch.q.device)
    for request, rows in requests(batch):
        scores = _scores(batch, request, rows)
        out[rows, : scores.shape[1]] = scores
    return out


def select(
    batch: IndexerBatch, topk: int, *, as_slots: bool = False, out: torch.Tensor | None = None
) -> torch.Tensor:
    """:class:`~sglang_indexcache.kernels.contract.Select`."""
    if out is None:
        out = torch.empty(len(batch.q), topk, dtype=torch.int32, device=batch.q.device)
    out.fill_(PADDING)
    for request, rows in requests(batch):
        scores = _scores(batch, request, rows)
        selection = _largest(scores, batch.visible[rows], topk)
        if as_slots:
            selection = slots_of(selection, batch.block_table[request]).to(torch.int32)
        out[rows] = selection
    return out


def topk(
    logits: torch.Tensor, visible: torch.Tensor, topk: int, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """:class:`~sglang_indexcache.kernels.contract.TopK`, for any k and integers of any width."""
    selection = _largest(logits, visible, topk)
    return selection if out is None else out.copy_(selection)


def _largest(logits: torch.Tensor, visible: torch.Tensor, k: int) -> torch.Tensor:
    """Return ``[T, k]`` int32: each row's k largest visible logits, ascending by position.

    Ties (``-0.0`` is ``+0.0``) go to the smaller position, so the result is a function of the
    values alone: the same on every rank, in every run, for every implementation.
    """
    selection = torch.full((len(logits), k), PADDING, dtype=torch.int32, device=logits.device)
    for row, limit, indices in zip(logits, visible.tolist(), selection, strict=True):
        order = torch.sort(row[:limit] + 0.0, descending=True, stable=True).indices[:k]
        indices[: len(order)] = torch.sort(order).values
    return selection


def requests(batch: IndexerBatch) -> Iterator[tuple[int, slice]]:
    """Yield the number and rows of every request that has rows; unlike a kernel, read lengths."""
    if batch.query_starts is not None:
        starts = batch.query_starts.tolist()
    else:
        starts = [b * batch.rows_per_request for b in range(len(batch.block_table) + 1)]
    for request, (start, end) in enumerate(pairwise(starts)):
        if end > start:
            yield request, slice(start, end)


def _scores(batch: IndexerBatch, request: int, rows: slice) -> torch.Tensor:
    """Return logits ``[rows, n]``, where n is the largest number of tokens that a row sees."""
    longest = int(batch.visible[rows].max())
    keys, scales = request_keys(batch.pages, batch.block_table[request], longest)
    return logits_in_order(batch.q[rows], keys, batch.weights[rows], scales)


def logits_tolerance(
    q: torch.Tensor,
    keys: torch.Tensor,
    weights: torch.Tensor,
    scales: torch.Tensor,
    bits: int = HOPPER_FP8_BITS,
) -> torch.Tensor:
    """Bound the distance of a logit from exact arithmetic on the same quantised inputs.

    A matrix unit aligns 32 products and the accumulator to the largest of the 33, drops the bits
    below ``bits``, and adds: each term loses up to ``2^-bits`` of the largest. Hopper's FP8 unit
    keeps 13 (DeepSeek-V3 report, section 3.3.2: "around 14 bits"; SageAttention2's FP22). The
    float32 sum over the heads adds ``H * 2^-23`` of its terms.

    Args:
        q: ``[T, H, 128]`` and ``keys``: ``[S, 128]``, any dtype that holds e4m3 exactly.
        weights: ``[T, H]``.
        scales: ``[S]``.

    Returns:
        ``[T, S]`` float64.
    """
    steps = q.double().unflatten(-1, (-1, 32)), keys.double().unflatten(-1, (-1, 32))
    sums = torch.einsum("thgi,sgi->tghs", *steps).cumsum(1)
    largest = torch.einsum("thg,sg->tghs", *(step.abs().amax(-1) for step in steps))
    aligned = torch.maximum(sums.abs(), largest)
    aligned[:, 1:] = torch.maximum(aligned[:, 1:], sums[:, :-1].abs())
    dot_error = 33 * 2.0**-bits * aligned.sum(1)
    dots = sums[:, -1].relu() + dot_error
    error = dot_error + q.shape[1] * 2.0**-23 * dots
    return torch.einsum("th,ths->ts", weights.double().abs(), error) * scales.double()
