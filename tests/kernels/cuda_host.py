"""The host-and-device code of ``csrc/``, compiled for this machine's CPU."""

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Sequence
from ctypes import c_float, c_int, c_int64, c_uint32, c_uint64
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from numpy.typing import NDArray

from sglang_indexcache.kernels.build import source_folder

EMULATOR = Path(__file__).with_name("emulator")


def compiled(command: Callable[[Path], Sequence[str]]) -> ctypes.CDLL:
    """Load what ``command`` compiles to the path that it is given; no file stays behind."""
    with TemporaryDirectory(prefix="indexcache-") as folder:
        target = Path(folder) / "library.so"
        process = subprocess.run(command(target), capture_output=True, text=True, check=False)
        assert process.returncode == 0, process.stderr[-3000:]
        return ctypes.CDLL(str(target))


@cache
def host() -> ctypes.CDLL:
    """Return ``emulator/checks.cpp`` as a library; built once a process."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.fail("these tests need a C++ compiler")
    flags = ["-std=c++17", "-O2", "-shared", "-fPIC", "-ffp-contract=off"]
    command = [compiler, *flags, f"-I{source_folder()}", str(EMULATOR / "checks.cpp"), "-o"]
    library = compiled(lambda target: [*command, str(target)])
    library.check_order_key.restype = c_uint32
    library.check_gate_edge.restype = c_float
    library.check_below.restype = c_uint32
    return library


def pointer(array: NDArray) -> ctypes.c_void_p:
    assert array.flags.c_contiguous
    return array.ctypes.data_as(ctypes.c_void_p)


def gate(row: NDArray, k: int, seed: int, order: NDArray | None = None) -> tuple[NDArray, int, int]:
    """Select through the streaming gate; return the fullest list and all entries ever listed, too.

    ``order`` is that of the row's pages, int32.
    """
    out = np.full(k, 7777777, dtype=np.int32)
    entries = c_int64()
    fullest = host().check_gate(
        pointer(row),
        c_int(len(row)),
        c_int(k),
        c_uint64(seed),
        None if order is None else pointer(order),
        pointer(out),
        ctypes.byref(entries),
    )
    return out, fullest, entries.value


def split_count(tiles: int, pages: int, resident: int) -> int:
    return int(host().check_split_count(tiles, pages, resident))


def order_key(value: float) -> int:
    return int(host().check_order_key(c_float(value)))


def gate_bin(value: float) -> int:
    return int(host().check_gate_bin(c_float(value)))


def gate_edge(index: int) -> float:
    return float(host().check_gate_edge(c_int(index)))


def constant(name: str) -> int:
    value = int(host().check_constant(name.encode()))
    assert value != -1, name
    return value
