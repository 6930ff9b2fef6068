"""DeepEP between the ranks of a server here: its exchanges of tokens, over gloo."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from tests.rehearsal.stage import collectives, graphs
from tests.rehearsal.stage.launches import find

T = torch.Tensor


class _Group:
    def __init__(self, group: Any) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def rows(self, mine: T) -> list[T]:
        counts = [int(n) for n in collectives.everybodys(torch.tensor([len(mine)]), self._group)]
        padded = mine.new_zeros(max(*counts, 1), *mine.shape[1:])
        padded[: len(mine)] = mine
        parts = collectives.everybodys(padded, self._group)
        return [part[:count] for part, count in zip(parts, counts, strict=True)]


class _Event:
    """Work is done when it is launched."""

    def current_stream_wait(self) -> None: ...


class Config:
    """Stands for ``deep_ep.Config``."""

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, ranks: int) -> int:
        return 0

    get_rdma_buffer_size_hint = get_nvl_buffer_size_hint


class Buffer:
    """Stands for ``deep_ep.Buffer`` in normal mode, which reads counts on the host."""

    num_sms = 20
    low_latency_mode = False
    get_dispatch_config = get_combine_config = staticmethod(lambda ranks: Config())
    capture = staticmethod(_Event)

    def __init__(self, group: Any, nvl: int, rdma: int, low_latency_mode: bool, **_: Any) -> None:
        assert not low_latency_mode, "low-latency mode has no reference"
        self._group = _Group(group)

    def get_dispatch_layout(self, topk_idx: T, num_experts: int, **_: Any) -> tuple[Any, ...]:
        of = (topk_idx, num_experts, self._group.size)
        return (*find("deep_ep.get_dispatch_layout")(*of), _Event())

    def dispatch(
        self, x: T, topk_idx: T, topk_weights: T, is_token_in_rank: T, num_tokens_per_expert: T,
        expert_alignment: int, **_: Any,
    ) -> tuple[Any, ...]:  # fmt: skip
        assert not graphs.is_capturing(), "normal mode cannot be captured"
        of = (x, topk_idx, topk_weights, is_token_in_rank, len(num_tokens_per_expert))
        return (*find("deep_ep.dispatch")(*of, expert_alignment, self._group), _Event())

    def combine(self, x: T, handle: Any, **_: Any) -> tuple[T, None, _Event]:
        return find("deep_ep.combine")(x, handle, self._group), None, _Event()


def install() -> None:
    """Let ``import deep_ep`` find it."""
    module = ModuleType("deep_ep")
    module.Buffer, module.Config = Buffer, Config  # type: ignore[attr-defined]
    sys.modules["deep_ep"] = module
