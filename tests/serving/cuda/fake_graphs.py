"""CUDA graphs without CUDA: what is launched while a graph records runs at its replay.

SGLang's own code warms up, captures and replays; only the device under it is a stand-in. As on a
GPU a graph keeps tensors and not values: one that a warm-up made is never written again, and
whoever reads it in a replay reads what the warm-up left there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.runner_backend.breakable_cuda_graph_backend import (
    BreakableCudaGraphBackend,
)
from sglang.srt.model_executor.runner_backend.full_cuda_graph_backend import FullCudaGraphBackend
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import (
    breakable_cuda_graph,
)


class FakeGraph:
    """Stands in for ``torch.cuda.CUDAGraph``."""

    recording: FakeGraph | None = None

    def __init__(self) -> None:
        self._launches: list[Callable[[], Any]] = []

    def capture_begin(self, **_options: Any) -> None:
        assert FakeGraph.recording is None
        FakeGraph.recording = self

    def capture_end(self) -> None:
        FakeGraph.recording = None

    def replay(self) -> None:
        for run in self._launches:
            run()


def launch(kernel: Callable[[], Any]) -> None:
    """Run ``kernel`` now, or at each replay of the graph that records."""
    if FakeGraph.recording is None:
        kernel()
    else:
        FakeGraph.recording._launches.append(kernel)


class FakeStream:
    """The one stream there is."""

    stream_id = 0

    def wait_stream(self, other: FakeStream) -> None:
        """It is the same."""


@contextmanager
def _graph(cuda_graph: FakeGraph, **_options: Any) -> Iterator[None]:
    cuda_graph.capture_begin()
    try:
        yield
    finally:
        cuda_graph.capture_end()


class FakeDevice:
    """Stands in for ``torch.cuda`` as the module of the device."""

    Stream = FakeStream
    synchronize = staticmethod(lambda: None)
    current_stream = staticmethod(FakeStream)
    stream = staticmethod(nullcontext)
    graph = staticmethod(_graph)


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device on which graphs can be captured."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(breakable_cuda_graph, "get_device_module", lambda: FakeDevice)
    monkeypatch.setattr(FakeGraph, "recording", None)


def _runner_backend(cls: type, **fields: Any) -> Any:
    """One of SGLang's graph backends without the runner that would build it."""
    made = cls.__new__(cls)
    runner = SimpleNamespace(
        cuda_graph_output_capacity_rows=lambda output: None,
        cuda_graph_output_rows=lambda output: None,
    )
    precarve = SimpleNamespace(measure=nullcontext, mint=lambda: None)
    common = {
        "_graphs": {}, "_outputs": {}, "_pool": None, "_capture_stream": None,
        "_device_module": FakeDevice, "_precarve": precarve, "_cuda_graph_runner": runner,
        "_tp_group": SimpleNamespace(barrier=lambda: None), "_memory_saver_adapter": None,
    }  # fmt: skip
    vars(made).update(common | fields)
    return made


def full_graphs() -> FullCudaGraphBackend:
    """SGLang's backend of decode graphs."""
    backend: FullCudaGraphBackend = _runner_backend(
        FullCudaGraphBackend, _reuse_output_buffer=False, _output_buffer=None
    )
    return backend


def breakable_graphs() -> BreakableCudaGraphBackend:
    """SGLang's backend of prefill graphs, which break at every attention."""
    backend: BreakableCudaGraphBackend = _runner_backend(
        BreakableCudaGraphBackend,
        _capture_inputs={},
        _shared_output_buffer=None,
        _debug_eager=False,
    )
    return backend
