"""``torch.cuda`` for one card of the Hopper generation, whose memory is the host's.

Which tensors are on the card is a mark on their storage, set where one is made there, moved there
or computed from one that is. So ``tensor.device``, ``.cpu()`` and ``.to("cuda")`` behave as on a
card: a copy is a copy, and what the host may not read while a graph is captured is an error.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

# Triton kernels run in Triton's interpreter; the radix tree is Python's, as Rust's asks the driver.
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", "python")

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.overrides import TorchFunctionMode

from tests.rehearsal.stage import graphs

T = torch.Tensor
CPU = torch.device("cpu")
CARDS = 8
FREE_BYTES = 4 << 30
"""What SGLang sizes its pools by; a test's server says how many tokens it wants anyway."""

_current = {"device": 0}
_thread = threading.local()


class _Properties:
    """Properties of an H100 with 80 GB; what nobody asked for so far is 0."""

    name = "NVIDIA H100 80GB HBM3"
    total_memory = 80 << 30
    multi_processor_count = 132
    major, minor, warp_size = 9, 0, 32
    L2_cache_size = 50 << 20
    max_threads_per_multi_processor = 2048
    regs_per_multiprocessor = 65536
    shared_memory_per_block_optin = 232448
    gcnArchName = ""  # noqa: N815  (as torch names it)
    uuid = "0"

    def __getattr__(self, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        return 0


class _Runtime:
    """CUDA's runtime, as far as torch hands it on: it pins memory of the host for copies."""

    cudaHostRegister = cudaHostUnregister = staticmethod(lambda *_: 0)  # noqa: N815


class _Stream:
    """Work is done when it is launched, so only a graph on record has anything to wait for."""

    _ids = itertools.count()

    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_stream = self.stream_id = next(self._ids)
        self.device = device()

    def wait_stream(self, other: Any) -> None:
        graphs.wait(self)

    def wait_event(self, event: Any) -> None:
        graphs.wait(self)

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: Any) -> None: ...


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def wait(self, stream: Any = None) -> None:
        graphs.wait(stream or torch.cuda.current_stream())

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


class _StreamContext:
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._before = getattr(_thread, "stream", None)
        if self._stream is not None:
            _thread.stream = self._stream

    def __exit__(self, *_: Any) -> None:
        _thread.stream = self._before


class _Generator(torch.Generator):
    def __new__(cls, device: Any = "cpu") -> Any:
        return torch._C.Generator.__new__(torch.Generator, "cpu")


def device() -> torch.device:
    """Return the card that this process works on; each rank of a server is a process of its own."""
    return torch.device("cuda", _current["device"])


def is_on_card(tensor: Any) -> bool:
    """Whether a tensor's storage bears the mark."""
    try:
        return getattr(tensor.untyped_storage(), "is_on_card", False)
    except (NotImplementedError, RuntimeError):
        return False


def mark(result: Any) -> Any:
    """Mark the storages of a result, however nested, as on the card."""
    if isinstance(result, T):
        with suppress(NotImplementedError, RuntimeError):
            result.untyped_storage().is_on_card = True  # type: ignore[attr-defined]
    elif isinstance(result, (tuple, list)):
        for part in result:
            mark(part)
    return result


def _kind(place: Any) -> str | None:
    """Return ``cuda`` or ``cpu`` if ``place`` names a device, else nothing."""
    if isinstance(place, torch.device):
        return place.type if place.type in ("cuda", "cpu") else None
    if isinstance(place, str):
        return "cuda" if place.startswith("cuda") else "cpu" if place == "cpu" else None
    return None


_DEVICE, _IS_CUDA = T.device.__get__, T.is_cuda.__get__  # type: ignore[attr-defined]
_READS = {T.item, T.tolist, T.__bool__, T.__int__, T.__float__, T.__index__, T.numpy, T.nonzero}
_READS.add(torch.nonzero)
_MOVES = {T.to, T.cpu, T.cuda}
_ANSWERS: dict[Any, Callable[..., Any]] = {
    torch.device: torch.device,
    _DEVICE: lambda t: device() if is_on_card(t) else _DEVICE(t),
    _IS_CUDA: is_on_card,
    T.get_device: lambda t: _current["device"] if is_on_card(t) else -1,
    T.pin_memory: lambda t, *_: t,
    T.is_pinned: lambda *_: True,
}

PYTHON_OPS: dict[str, Callable[..., Any]] = {}
"""Custom ops of SGLang whose body is Python, run as such: else their insides would not be seen."""
KERNEL_OF: list[Callable[[str], Callable[..., Any]]] = []
"""Of a compiled op's name, what stands for it: the one entry is put there by ``launches``."""
_KERNEL_LIBRARIES = ("sgl_kernel.", "deep_gemm.", "flash_mla", "sgl_kernel::")


def _op_name(function: Any) -> str:
    is_op = isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))
    return str(function).removesuffix(".default") if is_op else ""


class _Card(TorchFunctionMode):
    """Keeps the marks, sends custom ops to references, and answers what a tensor's device is."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if (answer := _ANSWERS.get(function)) is not None:
            return answer(*args, **kwargs)
        name = _op_name(function)
        if name in PYTHON_OPS:
            with self:
                return PYTHON_OPS[name](*args, **kwargs)
        if name.startswith(_KERNEL_LIBRARIES) and name != "deep_gemm.init":
            return KERNEL_OF[0](name)(*args, **kwargs)
        return self._on_the_host(function, args, kwargs)

    def _on_the_host(self, function: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs, place = _without_places(function, args, kwargs)
        tensors = [a for a in args if isinstance(a, T)]
        if function is T.to and len(tensors) > 1:
            place = "cuda" if is_on_card(tensors[1]) else "cpu"
        if args and isinstance(args[0], (tuple, list)):
            tensors += [a for a in args[0] if isinstance(a, T)]
        was_there = any(map(is_on_card, tensors))
        _refuse_in_capture(function, place, bool(tensors), was_there)
        if function is T.cuda:
            out = args[0]
        elif kwargs.get("out_dtype") is not None and function in (torch.mm, torch.bmm):
            wide = kwargs["out_dtype"]  # cuBLAS can, the host's library cannot
            out = function(args[0].to(wide), args[1].to(wide))
        else:
            out = function(*args, **kwargs)
        if function in _MOVES and place and (place == "cuda") != was_there and isinstance(out, T):
            out = out.clone() if out.data_ptr() == args[0].data_ptr() else out
        if place == "cuda" or (place is None and (was_there or (not tensors and _makes_there()))):
            mark(out)
        return out


def _without_places(function: Any, args: Any, kwargs: Any) -> tuple[Any, Any, str | None]:
    """``args`` and ``kwargs`` with the host for every device, and the place that they named."""
    place = "cuda" if function is T.cuda else "cpu" if function is T.cpu else None
    if kwargs.get("device") is not None:
        device = "cuda" if isinstance(kwargs["device"], int) else _kind(kwargs["device"])
        place = device or place
        kwargs = {**kwargs, "device": CPU if device else kwargs["device"]}
    if kwargs.get("pin_memory"):
        kwargs = {**kwargs, "pin_memory": False}
    if any(isinstance(a, (torch.device, str)) for a in args):
        kinds = [_kind(a) for a in args]
        place = next((kind for kind in kinds if kind), place)
        args = tuple(CPU if kind else a for a, kind in zip(args, kinds, strict=True))
    return args, kwargs, place


def _refuse_in_capture(
    function: Any, place: str | None, has_tensors: bool, was_there: bool
) -> None:
    """Refuse what ends a capture on a card: host reads, and copies to it from the host's memory."""
    if not graphs.is_capturing():
        return
    if function in _READS and was_there:
        raise RuntimeError(f"the host reads while a CUDA graph is captured: {function.__name__}")
    if place == "cuda" and ((has_tensors and not was_there) or function is torch.tensor):
        raise RuntimeError(f"the host copies while a CUDA graph is captured: {function}")


_made = {"there": False}


def _makes_there() -> bool:
    """Whether the default device is the card."""
    return _made["there"]


def _set_default_device(place: Any) -> None:
    _made["there"] = _kind(place) == "cuda"


def _set_device(index: Any) -> None:
    _current["device"] = index if isinstance(index, int) else torch.device(index).index or 0


def _gloo(function: Callable[..., Any], positional: int) -> Callable[..., Any]:
    """Return a process group over gloo where NCCL was asked for."""

    def call(*args: Any, **kwargs: Any) -> Any:
        args = args[:positional]
        backend = kwargs.get("backend") or (args[0] if args and isinstance(args[0], str) else None)
        if backend and "nccl" in backend:
            kwargs["backend"] = "gloo"
            args = args[1:] if args and isinstance(args[0], str) else args
        kwargs.pop("device_id", None)
        kwargs.pop("pg_options", None)
        return function(*args, **kwargs)

    return call


def _masquerade() -> None:
    """Let ``torch.cuda`` answer for the card."""
    cuda: Any = torch.cuda
    default = _Stream()
    constants = {
        "is_available": True,
        "device_count": CARDS,
        "get_device_capability": (9, 0),
        "get_device_name": _Properties.name,
        "get_device_properties": _Properties(),
        "mem_get_info": (FREE_BYTES, 80 << 30),
        "is_initialized": True,
        "memory_reserved": 0,
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "default_stream": default,
        "graph_pool_handle": (0, 0),
    } | dict.fromkeys(
        (
            *("empty_cache", "synchronize", "init", "_lazy_init", "reset_peak_memory_stats"),
            *("manual_seed", "manual_seed_all", "ipc_collect"),
        )
    )
    for name, value in constants.items():
        setattr(cuda, name, lambda *_, _value=value, **__: _value)
    cuda.cudart = lambda: _Runtime
    cuda.memory_stats = lambda *_, **__: {}
    cuda.set_device = _set_device
    cuda.current_device = lambda: _current["device"]
    cuda.Stream, cuda.Event, cuda.StreamContext = _Stream, _Event, _StreamContext
    cuda.current_stream = lambda *_: getattr(_thread, "stream", None) or default
    cuda.set_stream = lambda stream: setattr(_thread, "stream", stream)
    cuda.stream = _StreamContext
    cuda.device = lambda *_: nullcontext()
    cuda.CUDAGraph = cuda.graphs.CUDAGraph = graphs.Graph
    cuda.graph = cuda.graphs.graph = graphs.capture
    cuda.is_current_stream_capturing = graphs.is_capturing
    of = torch.get_device_module
    torch.get_device_module = lambda place=None: cuda if place is None else of(place)
    torch.set_default_device = _set_default_device
    torch.get_default_device = lambda: device() if _makes_there() else CPU
    torch.Generator = _Generator  # type: ignore[misc]
    T.record_stream = lambda *_: None  # type: ignore[method-assign]
    for module in (dist, distributed_c10d):
        module.init_process_group = _gloo(module.init_process_group, 8)  # type: ignore[attr-defined]
        module.new_group = _gloo(module.new_group, 2)  # type: ignore[attr-defined]


def _enter() -> None:
    """Put this thread and every later one under the mode."""
    _Card().__enter__()
    graphs.Exact().__enter__()
    run = threading.Thread.run

    def run_on_stage(thread: threading.Thread) -> None:
        with _Card(), graphs.Exact():
            run(thread)

    threading.Thread.run = run_on_stage  # type: ignore[method-assign]


_masquerade()
_enter()
