"""CUDA graphs for the checks, and what stands for them on a CPU.

A recorded graph does what a CUDA graph does: a replay runs no Python, only the operations that were
launched, on the tensors that they were launched with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Recording(TorchDispatchMode):
    """Every operation of a block, to be repeated into the tensors of the first time."""

    def __init__(self) -> None:
        super().__init__()
        self._launched: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._launched.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        """Run what was launched."""
        for func, args, kwargs, out in self._launched:
            _write(out, func(*args, **kwargs))


def _write(out: Any, again: Any) -> None:
    if isinstance(out, torch.Tensor):
        if out.data_ptr() != again.data_ptr():  # neither a view nor written in place
            out.copy_(again)
    elif isinstance(out, (tuple, list)):
        for one, other in zip(out, again, strict=True):
            _write(one, other)


class CpuGraph:
    """Stands for ``torch.cuda.CUDAGraph``."""

    def capture_begin(self, **_options: Any) -> None:
        """Record from here on."""
        self._recording = Recording()
        self._recording.__enter__()

    def capture_end(self) -> None:
        """Stop."""
        self._recording.__exit__(None, None, None)

    def replay(self) -> None:
        """Run what was recorded."""
        self._recording.replay()


class CpuStream:
    """The one stream there is."""

    stream_id = 0

    def wait_stream(self, other: CpuStream) -> None:
        """It is the same."""


@contextmanager
def _graph(cuda_graph: CpuGraph, **_options: Any) -> Iterator[None]:
    cuda_graph.capture_begin()
    try:
        yield
    finally:
        cuda_graph.capture_end()


CPU: Any = SimpleNamespace(
    Stream=CpuStream,
    CUDAGraph=CpuGraph,
    synchronize=lambda: None,
    current_stream=CpuStream,
    stream=nullcontext,
    graph=_graph,
    graph_pool_handle=lambda: None,
    memory_reserved=lambda: 0,
)


def module(dry: bool) -> Any:
    """``torch.cuda``, or what stands for it."""
    return CPU if dry else torch.cuda


@contextmanager
def sglang_on(dry: bool) -> Iterator[Any]:
    """The device's module, with SGLang's graphs on it."""
    if not dry:
        yield torch.cuda
        return
    from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import (
        breakable_cuda_graph,
    )

    with (
        mock.patch.object(torch.cuda, "CUDAGraph", CpuGraph),
        mock.patch.object(breakable_cuda_graph, "get_device_module", return_value=CPU),
    ):
        yield CPU


class Replayed:
    """A function of tensors, run once to warm up and captured on a side stream.

    In a dry run the function is the graph: references decide by values, which no recording could.
    """

    def __init__(self, body: Callable[[], Any], dry: bool) -> None:
        self._body, self._graph = body, None
        before = module(dry).memory_reserved()
        if dry:
            body()
        else:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                body()
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, stream=side):
                body()
        self.pool_bytes = module(dry).memory_reserved() - before

    def replay(self) -> None:
        """Run it once more, with what its tensors hold now."""
        if self._graph is None:
            self._body()
        else:
            self._graph.replay()
            torch.cuda.synchronize()
