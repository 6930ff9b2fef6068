"""SGLang's graph backends without a runner, on a card or on what stands for one.

A recorded graph does what a CUDA graph does: a replay runs no Python, only the operations that were
launched, on the tensors that they were launched with.
"""

from __future__ import annotations

from collections.abc import Iterator
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
        for target, source in zip(out, again, strict=True):
            _write(target, source)


class CpuGraph:
    """Stands for ``torch.cuda.CUDAGraph``."""

    def capture_begin(self, **_options: Any) -> None:
        """Begin to record."""
        self._recording = Recording()
        self._recording.__enter__()

    def capture_end(self) -> None:
        """Stop recording."""
        self._recording.__exit__(None, None, None)

    def replay(self) -> None:
        """Run what was recorded."""
        self._recording.replay()


class CpuStream:
    """The one stream there is."""

    stream_id = 0

    def wait_stream(self, stream: CpuStream) -> None:
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
)


def device_module() -> Any:
    """``torch.cuda`` where tensors are made on a card by default, else what stands for it."""
    return torch.cuda if torch.get_default_device().type == "cuda" else CPU


@contextmanager
def sglang_graphs() -> Iterator[None]:
    """SGLang captures and replays on :func:`device_module`."""
    if device_module() is torch.cuda:
        yield
        return
    from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import (
        breakable_cuda_graph,
    )

    with (
        mock.patch.object(torch.cuda, "CUDAGraph", CpuGraph),
        mock.patch.object(breakable_cuda_graph, "get_device_module", return_value=CPU),
    ):
        yield


def runner_backend(cls: type, **fields: Any) -> Any:
    """Return one of SGLang's graph backends without the runner that would build it."""
    built: Any = cls.__new__(cls)
    runner = SimpleNamespace(
        cuda_graph_output_capacity_rows=lambda _: None,
        cuda_graph_output_rows=lambda _: None,
    )
    device = device_module()
    vars(built).update(
        _graphs={},
        _outputs={},
        _pool=device.graph_pool_handle(),
        _capture_stream=device.Stream(),
        _device_module=device,
        _precarve=SimpleNamespace(measure=nullcontext, mint=lambda: None),
        _cuda_graph_runner=runner,
        _tp_group=SimpleNamespace(barrier=lambda: None),
        _memory_saver_adapter=None,
        **fields,
    )
    return built
