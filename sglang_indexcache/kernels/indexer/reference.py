"""The lightning indexer in its most obvious form: one request, one row at a time."""

from collections.abc import Iterator
from itertools import pairwise

import torch

from sglang_indexcache.kernels.contract import INDEX_DIM, PADDING, PAGE_TOKENS
from sglang_indexcache.kernels.indexer.quantization import read_pages
from sglang_indexcache.kernels.topk.reference import topk_ascending


def indexer_logits(q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """``logits[t, s] = sum_h weights[t, h] * relu(q[t, h] . keys[s])``.

    The softmax scale and the per-head gate are both inside ``weights``, as SGLang's indexer
    passes them to its kernels.

    Args:
        q: ``[T, H, D]`` rotated index queries.
        keys: ``[S, D]`` rotated, normalised index keys.
        weights: ``[T, H]`` float32, may be negative.

    Returns:
        ``[T, S]`` logits in ``weights``' dtype, without a causal mask.
    """
    dtype = weights.dtype
    per_head = torch.einsum("thd,sd->ths", q.to(dtype), keys.to(dtype))
    return torch.einsum("th,ths->ts", weights, per_head.relu())


def logits_in_order(
    q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """The same in the order of float32 arithmetic that ``contracts.py`` states.

    A dot product of e4m3 vectors is a sum of 128 integers times ``2^-18`` below ``2^44``: exact in
    float64 in any order, so every bit of the result is a function of its row and its key alone.
    A float64 sum rounded to float32 is a fused multiply-add but for rare double rounding.

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
    """The first ``tokens`` keys ``[tokens, 128]`` e4m3 and scales of one request."""
    return read_pages(pages, slots_of(torch.arange(tokens), block_row), INDEX_DIM)


def slots_of(positions: torch.Tensor, block_row: torch.Tensor) -> torch.Tensor:
    """Physical token slots of ``positions`` of one request; -1 stays -1."""
    positions = positions.to(block_row.device).long()
    page = block_row[positions.clamp_min(0) // PAGE_TOKENS].long()
    return torch.where(positions < 0, PADDING, page * PAGE_TOKENS + positions % PAGE_TOKENS)


def indexer_logits_prefill(
    q: torch.Tensor,
    weights: torch.Tensor,
    pages: torch.Tensor,
    block_table: torch.Tensor,
    query_starts: torch.Tensor,
    visible: torch.Tensor,
    width: int,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """:class:`~sglang_indexcache.kernels.contract.IndexerLogitsPrefill`."""
    if out is None:
        out = torch.full((q.shape[0], width), float("nan"), device=q.device)
    for request, start, end in _requests(query_starts):
        longest = int(visible[start:end].max())
        keys, scales = request_keys(pages, block_table[request], longest)
        out[start:end, :longest] = logits_in_order(q[start:end], keys, weights[start:end], scales)
    return out


def indexer_logits_decode(
    q: torch.Tensor,
    weights: torch.Tensor,
    pages: torch.Tensor,
    block_table: torch.Tensor,
    visible: torch.Tensor,
    width: int,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """:class:`~sglang_indexcache.kernels.contract.IndexerLogitsDecode`."""
    if out is None:
        out = torch.full((*visible.shape, width), float("nan"), device=q.device)
    for request, lens in enumerate(visible):
        longest = int(lens.max())
        keys, scales = request_keys(pages, block_table[request], longest)
        out[request, :, :longest] = logits_in_order(q[request], keys, weights[request], scales)
    return out


def indexer_select_prefill(
    q: torch.Tensor,
    weights: torch.Tensor,
    pages: torch.Tensor,
    block_table: torch.Tensor,
    query_starts: torch.Tensor,
    visible: torch.Tensor,
    topk: int,
    *,
    as_slots: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """:class:`~sglang_indexcache.kernels.contract.IndexerSelectPrefill`."""
    if out is None:
        out = torch.empty(q.shape[0], topk, dtype=torch.int32, device=q.device)
    out.fill_(PADDING)
    for request, start, end in _requests(query_starts):
        block_row, rows = block_table[request], slice(start, end)
        keys, scales = request_keys(pages, block_row, int(visible[rows].max()))
        logits = logits_in_order(q[rows], keys, weights[rows], scales)
        chosen = topk_ascending(logits, visible[rows], topk)
        out[rows] = slots_of(chosen, block_row).to(torch.int32) if as_slots else chosen
    return out


def indexer_select_decode(
    q: torch.Tensor,
    weights: torch.Tensor,
    pages: torch.Tensor,
    block_table: torch.Tensor,
    visible: torch.Tensor,
    topk: int,
    *,
    as_slots: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """:class:`~sglang_indexcache.kernels.contract.IndexerSelectDecode`."""
    batch, next_n = visible.shape
    starts = torch.arange(0, (batch + 1) * next_n, next_n, dtype=torch.int32, device=q.device)
    chosen = indexer_select_prefill(
        q.flatten(0, 1),
        weights.flatten(0, 1),
        pages,
        block_table,
        starts,
        visible.flatten(),
        topk,
        as_slots=as_slots,
        out=None if out is None else out.flatten(0, 1),
    )
    return chosen.view(batch, next_n, topk)


def _requests(query_starts: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    """Number, first row and end of every request that has rows."""
    starts = query_starts.tolist()
    for request, (start, end) in enumerate(pairwise(starts)):
        if end > start:
            yield request, start, end
