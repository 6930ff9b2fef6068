"""Collectives of several cards over gloo, as launches that a recording keeps.

Each rank is a process. Sums are taken in float64 in the order of ranks and rounded once, so every
rank has the same bits, which NCCL promises too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from tests.rehearsal.stage import card, graphs

T = torch.Tensor


def everybodys(tensor: T, group: Any) -> list[T]:
    """Gather each rank's tensor in ``group``, moved as bytes: gloo does not know every dtype."""
    mine = tensor.contiguous()
    flat = mine.reshape(-1).view(torch.uint8)
    all_bytes = [torch.empty_like(flat) for _ in range(dist.get_world_size(group))]
    _ORIGINAL["all_gather"](all_bytes, flat, group=group)
    return [part.view(mine.dtype).view(mine.shape) for part in all_bytes]


def _total(parts: list[T], op: Any = dist.ReduceOp.SUM) -> T:
    stacked = torch.stack([part.double() if part.is_floating_point() else part for part in parts])
    if op == dist.ReduceOp.SUM:
        total = stacked.sum(0)
    elif op == dist.ReduceOp.MAX:
        total = stacked.amax(0)
    elif op == dist.ReduceOp.MIN:
        total = stacked.amin(0)
    else:
        raise NotImplementedError(f"a collective with {op}")
    return total.to(parts[0].dtype)


def _reduce(tensor: T, op: Any, group: Any) -> None:
    tensor.copy_(_total(everybodys(tensor, group), op))


def _reduce_to(out: T, tensor: T, op: Any, group: Any) -> None:
    out.copy_(_total(everybodys(tensor, group), op))


def _gather(out: T, tensor: T, group: Any) -> None:
    out.view(-1).copy_(torch.cat([part.reshape(-1) for part in everybodys(tensor, group)]))


def _scatter_sum(out: T, tensor: T, op: Any, group: Any) -> None:
    total = _total(everybodys(tensor, group), op).reshape(-1)
    out.view(-1).copy_(total.chunk(dist.get_world_size(group))[dist.get_rank(group)])


def _broadcast(tensor: T, source: int, group: Any) -> None:
    """``source`` is a rank within ``group``."""
    _ORIGINAL["broadcast"](
        tensor.reshape(-1).view(torch.uint8), dist.get_global_rank(group, source), group=group
    )


class Communicator:
    """Stands for SGLang's ``PyNcclCommunicator``."""

    nccl_version = 0

    def __init__(self, group: Any, device: Any, *_: Any, **__: Any) -> None:
        self.group = group
        self.device = device
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.available = self.world_size > 1
        self.disabled = True

    @contextmanager
    def change_state(self, enable: bool | None = None) -> Iterator[None]:
        before, self.disabled = self.disabled, not (self.available if enable is None else enable)
        try:
            yield
        finally:
            self.disabled = before

    def all_reduce(self, tensor: T, op: Any = dist.ReduceOp.SUM) -> None:
        if not self.disabled:
            graphs.launch(_reduce, tensor, op, self.group)

    def outplace_all_reduce(
        self, tensor: T, out: T | None = None, op: Any = dist.ReduceOp.SUM
    ) -> Any:
        if self.disabled:
            return None
        out = torch.empty_like(tensor) if out is None else out
        graphs.launch(_reduce_to, out, tensor, op, self.group)
        return out

    def all_gather(self, out: T, tensor: T, sizes: list[int] | None = None) -> None:
        if sizes is not None:
            raise NotImplementedError("a gather of unequal sizes")
        if not self.disabled:
            graphs.launch(_gather, out, tensor, self.group)

    def reduce_scatter(
        self, out: T, tensor: T, op: Any = dist.ReduceOp.SUM, sizes: list[int] | None = None
    ) -> None:
        if sizes is not None:
            raise NotImplementedError("a scattered sum of unequal sizes")
        if not self.disabled:
            graphs.launch(_scatter_sum, out, tensor, op, self.group)

    def broadcast(self, tensor: T, src: int) -> None:
        if not self.disabled:
            graphs.launch(_broadcast, tensor, src, self.group)

    def send(self, tensor: T, dst: int) -> None:
        if not self.disabled:
            raise NotImplementedError("a send between cards outside torch.distributed")

    recv = send


_ORIGINAL = {name: getattr(dist, name) for name in ("all_gather", "broadcast")}
_BY_NAME: dict[str, Callable[..., None]] = {
    "all_reduce": _reduce,
    "all_gather_into_tensor": _gather,
    "all_gather_single": _gather,
    "reduce_scatter_tensor": _scatter_sum,
    "reduce_scatter_single": _scatter_sum,
}
"""torch's collectives that NCCL captures, with the same arguments, the group among them.

Those that the card's older torch lacks are passed over.
"""


def _on_the_card(name: str) -> Callable[..., Any]:
    """One of torch's collectives: a launch where a tensor is on the card, itself elsewhere."""
    original = getattr(dist, name)
    signature = inspect.signature(original)

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        if not card.is_on_card(bound.args[0]) or bound.arguments.pop("async_op"):
            return original(*args, **kwargs)
        return graphs.launch(_BY_NAME[name], *bound.arguments.values())

    return call


def install() -> None:
    """Put these in torch's place, before anybody imports one of them by name."""
    for name in filter(lambda name: hasattr(dist, name), _BY_NAME):
        setattr(dist, name, _on_the_card(name))


def stand_in() -> None:
    """Put :class:`Communicator` in SGLang's place."""
    import sglang.srt.distributed.device_communicators.pynccl as pynccl

    pynccl.PyNcclCommunicator = Communicator  # type: ignore[misc]
