"""Mooncake's transfer engine between two servers here: one process writes into another's memory.

A card's memory is the host's on the stage, so that is what a network card does. Registered memory
alone can be written from or to, as there.
"""

from __future__ import annotations

import ctypes
import os
import sys
from types import ModuleType

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PTRACER = 0x59616D61
_ANYBODY = ctypes.c_ulong(-1)


class _Range(ctypes.Structure):
    _fields_ = (("start", ctypes.c_void_p), ("length", ctypes.c_size_t))


class TransferEngine:
    """Stands for ``mooncake.engine.TransferEngine``; a process's port is its id."""

    def __init__(self) -> None:
        self._registered: dict[int, int] = {}

    def initialize(self, *_: str) -> int:
        _LIBC.prctl(_PR_SET_PTRACER, _ANYBODY)  # some kernels let only parents write
        return 0

    def get_rpc_port(self) -> int:
        return os.getpid()

    def batch_register_memory(self, starts: list[int], lengths: list[int]) -> int:
        self._registered.update(zip(starts, lengths, strict=True))
        return 0

    def batch_unregister_memory(self, starts: list[int]) -> int:
        for start in starts:
            del self._registered[start]
        return 0

    def batch_transfer_sync_write(
        self, session: str, sources: list[int], targets: list[int], lengths: list[int]
    ) -> int:
        peer = int(session.rpartition(":")[2])
        for source, target, length in zip(sources, targets, lengths, strict=True):
            assert any(
                start <= source and source + length <= start + size
                for start, size in self._registered.items()
            ), "memory that was not registered"
            ours, theirs = _Range(source, length), _Range(target, length)
            moved = _LIBC.process_vm_writev(peer, ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0)
            if moved != length:
                raise OSError(ctypes.get_errno(), f"{moved} of {length} bytes reached {session}")
        return 0


def install() -> None:
    """Let ``import mooncake.engine`` find it."""
    engine = ModuleType("mooncake.engine")
    engine.TransferEngine = TransferEngine  # type: ignore[attr-defined]
    sys.modules |= {"mooncake": ModuleType("mooncake"), "mooncake.engine": engine}
