"""DeepEP's exchange of tokens between the ranks that own experts, in its "normal" mode."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from tests.rehearsal.stage.registry import reference

T = torch.Tensor


class Group(Protocol):
    """The ranks that exchange, seen from one of them."""

    rank: int
    size: int

    def rows(self, mine: T) -> list[T]:
        """Gather each rank's rows, of any number."""


class Routes(NamedTuple):
    """Destinations of each rank's tokens, DeepEP's handle.

    ``goes[s]``: ``[tokens of s, ranks]``, whether rank ``s`` sends a token to a rank. A rank has
    what it received in the order of senders, and of tokens within a sender's.
    """

    goes: list[T]

    def start(self, sender: int, receiver: int) -> int:
        """Return where the rows of ``sender`` begin among those that ``receiver`` has."""
        return sum(int(goes[:, receiver].sum()) for goes in self.goes[:sender])


@reference("deep_ep.get_dispatch_layout")
def get_dispatch_layout(topk_idx: T, num_experts: int, ranks: int) -> tuple[T, None, T, T]:
    """Tokens for each rank, for each expert, and ``[T, ranks]``: whether a token goes to a rank."""
    assert topk_idx.dtype == torch.int64
    assert num_experts % ranks == 0
    owners = torch.where(topk_idx < 0, ranks, topk_idx // (num_experts // ranks))
    goes = torch.zeros(len(topk_idx), ranks + 1, dtype=torch.bool).scatter_(1, owners, True)
    by_expert = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts)
    goes = goes[:, :ranks].contiguous()
    return goes.sum(0).int(), None, by_expert.int(), goes


@reference("deep_ep.dispatch")
def dispatch(
    x: T, topk_idx: T, topk_weights: T, goes: T, num_experts: int, alignment: int, group: Group
) -> tuple[T, T, T, list[int], Routes]:
    """Send each token once to every rank that owns one of its experts.

    Returns what this rank received: rows, their experts counted from its own first, their weights,
    tokens for each expert up to a multiple of ``alignment``, and the handle. In the place of
    another rank's expert are -1 and no weight.
    """
    assert x.is_contiguous()
    assert x.dtype == torch.bfloat16, "FP8 on the way has no reference"
    assert x.shape[1] * x.element_size() % 16 == 0
    assert topk_weights.dtype == torch.float32
    routes = Routes(group.rows(goes))
    rows, ids, weights = (
        torch.cat([part[to[:, group.rank]] for part, to in zip(parts, routes.goes, strict=True)])
        for parts in map(group.rows, (x, topk_idx, topk_weights))
    )
    local = num_experts // group.size
    ids = ids - group.rank * local
    elsewhere = (ids < 0) | (ids >= local)
    ids[elsewhere], weights[elsewhere] = -1, 0.0
    counts = torch.bincount(ids[~elsewhere], minlength=local)
    return rows, ids, weights, (-(-counts // alignment) * alignment).tolist(), routes


@reference("deep_ep.combine")
def combine(x: T, routes: Routes, group: Group) -> T:
    """Return ``[T, D]``: for each of this rank's tokens, the sum of what all ranks made of it."""
    assert x.dtype == torch.bfloat16
    mine = routes.goes[group.rank]
    total = torch.zeros(len(mine), x.shape[1], dtype=torch.float64)
    for rank, outputs in enumerate(group.rows(x)):
        tokens = mine[:, rank].nonzero()[:, 0]
        start = routes.start(group.rank, rank)
        total.index_add_(0, tokens, outputs[start : start + len(tokens)].double())
    return total.to(x.dtype)


@reference("sglang.srt.layers.moe.token_dispatcher.deepep:_is_mnnvl_fabric_supported")
def is_fabric_supported() -> bool:
    """Whether cards of several machines share their memory: no."""
    return False
