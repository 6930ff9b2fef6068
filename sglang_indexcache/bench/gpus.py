"""What NVIDIA's data sheets say of a GPU; torch and pydantic are not needed to read it."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_indexcache.errors import BenchError


@dataclass(frozen=True)
class Gpu:
    """A data sheet, dense rates.

    Attributes:
        name: as NVIDIA's.
        bf16: FLOP/s.
        fp8: FLOP/s.
        bandwidth: of the memory, bytes/s.
    """

    name: str
    bf16: float
    fp8: float
    bandwidth: float


GPUS = {
    "h100": Gpu("H100 SXM", 989e12, 1979e12, 3.35e12),
    "h200": Gpu("H200 SXM", 989e12, 1979e12, 4.8e12),
    "b200": Gpu("B200", 2250e12, 4500e12, 8.0e12),
}


def find_gpu(name: str) -> Gpu:
    """A data sheet by name.

    Raises:
        BenchError: there is none.
    """
    if name.lower() not in GPUS:
        raise BenchError(f"no rates are known for {name!r}; there are {', '.join(GPUS)}")
    return GPUS[name.lower()]
