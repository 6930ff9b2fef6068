"""CUDA graphs as recordings, and products that do not depend on the batch.

A graph holds what was launched: operations of torch one by one, and a kernel's reference as one
entry. A replay runs no Python of the model, only those entries, on the tensors of the capture.

What a second stream launches comes as early as its waits allow, not where Python issued it. SGLang
counts on that: while a graph is captured, the shared expert reads hidden states on a stream of its
own that the routed experts, issued before it, overwrite at their end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_ATEN = torch.ops.aten
_PRODUCTS = {
    _ATEN.mm.default,
    _ATEN.bmm.default,
    _ATEN.addmm.default,
    _ATEN.baddbmm.default,
    _ATEN.mv.default,
    _ATEN.dot.default,
    _ATEN.mm.out,
    _ATEN.bmm.out,
    _ATEN.addmm.out,
}
_MAKERS = {_ATEN.empty.memory_format, _ATEN.empty_strided.default, _ATEN.empty_like.default}
"""What they make has no content, so a replay has nothing to do."""

_thread = threading.local()
Entry = tuple[Callable[..., Any], Any, Any, Any]


def _recording() -> list[Entry] | None:
    return getattr(_thread, "recording", None)


def _record(*entry: Any) -> None:
    """Put an entry where its stream stands: behind what that stream has waited for."""
    entries, places = _recording(), _thread.places
    assert entries is not None
    stream = id(torch.cuda.current_stream())
    at = places.get(stream, len(entries))
    entries.insert(at, entry)
    for storage, place in places.items():
        places[storage] = place + (place > at)
    places[stream] = at + 1


def wait(stream: Any) -> None:
    """Let what ``stream`` launches from now on come behind everything on record."""
    entries = _recording()
    if entries is not None:
        _thread.places[id(stream)] = len(entries)


def is_capturing(*_: Any) -> bool:
    """Whether this thread records a graph."""
    return _recording() is not None


class Exact(TorchDispatchMode):
    """Products in float64, rounded once; and every operation on record while a graph is captured.

    On a host as on a card, a product's last bits depend on how many rows are multiplied at once.
    In float64 they do not reach the 8 bits of bfloat16: answers alone and in a batch are the same.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        run = _exact(func) if func in _PRODUCTS else func
        out = run(*args, **kwargs)
        if is_capturing() and func not in _MAKERS:
            if func.namespace == "c10d":
                raise RuntimeError(f"a collective that a recording would not wait for: {func}")
            _record(run, args, kwargs, out)
        return out


def _exact(product: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        dtype = next(a.dtype for a in args if isinstance(a, torch.Tensor))
        if not dtype.is_floating_point or dtype == torch.float64:
            return product(*args, **kwargs)
        wide = [a.double() if isinstance(a, torch.Tensor) else a for a in args]
        if (out := kwargs.get("out")) is not None:
            return out.copy_(product.overloadpacket(*wide))
        return product(*wide, **kwargs).to(dtype)

    return run


def takes_part(stream: Any) -> bool:
    """Whether what ``stream`` launches now would be recorded behind something that already is."""
    return is_capturing() and id(stream) in _thread.places


def stand_in() -> None:
    """Let SGLang ask here which streams a capture has; it asks CUDA's runtime past torch."""
    import sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph as package

    package.breakable_cuda_graph._is_stream_capturing = takes_part


def launch(kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run what stands for one kernel; a recording keeps it whole, as one entry."""
    with torch._C.DisableTorchFunction(), _without_modes():
        out = kernel(*args, **kwargs)
    if is_capturing():
        _record(kernel, args, kwargs, out)
    return out


def _without_modes() -> Any:
    return torch.utils._python_dispatch._disable_current_modes()


class Graph:
    """Stands for ``torch.cuda.CUDAGraph``."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._entries: list[Entry] = []

    def capture_begin(self, *_: Any, **__: Any) -> None:
        _thread.recording, _thread.places = self._entries, {}

    def capture_end(self) -> None:
        _thread.recording = None

    def replay(self) -> None:
        with torch._C.DisableTorchFunction(), _without_modes():
            for run, args, kwargs, out in self._entries:
                _write(out, run(*args, **kwargs))

    def pool(self) -> tuple[int, int]:
        return (0, 0)

    def reset(self) -> None:
        self._entries.clear()

    def enable_debug_mode(self) -> None: ...

    def debug_dump(self, path: str) -> None: ...

    def instantiate(self) -> None: ...


def _write(out: Any, again: Any) -> None:
    """Put a new result where the capture's is, unless it is a view or was written in place."""
    if isinstance(out, torch.Tensor):
        if out.numel() and out.data_ptr() != again.data_ptr():
            out.copy_(again)
    elif isinstance(out, (tuple, list)):
        for first, second in zip(out, again, strict=True):
            _write(first, second)


class capture:  # noqa: N801  (as torch names it)
    """Stands for ``torch.cuda.graph``."""

    def __init__(self, cuda_graph: Graph, pool: Any = None, stream: Any = None, **_: Any) -> None:
        self._graph = cuda_graph
        self._stream = torch.cuda.stream(stream)

    def __enter__(self) -> None:
        self._stream.__enter__()
        self._graph.capture_begin()

    def __exit__(self, *_: Any) -> None:
        self._graph.capture_end()
        self._stream.__exit__(None, None, None)
