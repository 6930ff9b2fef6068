"""Our kernels for Hopper (sm_90a): thin loaders of ``csrc/``.

Their results were right on an H100 (benchmarks/results/kernels). Without a card, the layout and
selection code is tested on the host, and whole kernels are tested on an emulated card
(csrc/README.md).
"""

import logging
from functools import cache
from typing import Any

import torch

from sglang_indexcache.errors import KernelError
from sglang_indexcache.kernels.build import FOLDERS, cached, nvcc_version, warning_about

logger = logging.getLogger(__name__)


def unavailable() -> str | None:
    """Return why the kernels cannot be built or loaded on this machine, or None; needs no GPU."""
    try:
        import tvm_ffi  # noqa: F401

        if all(cached(folder) for folder in FOLDERS):
            for folder in FOLDERS:
                library(folder)
        else:
            nvcc_version()
    except (ImportError, KernelError) as error:
        return str(error)
    return None


@cache
def library(folder: str) -> Any:
    """Load the library of one folder of ``csrc/``; compile it first if the cache lacks it.

    Raises:
        KernelError: there is no nvcc, the compilation failed, or the library cannot be loaded.
    """
    import tvm_ffi

    from sglang_indexcache.kernels.build import build  # at the top it would hide the module

    built = build(folder)
    if warning := warning_about(built.compiler):
        logger.warning("IndexCache kernels, %s: %s", folder, warning)
    path = built.path
    try:
        return tvm_ffi.load_module(str(path))
    except (OSError, RuntimeError) as error:
        raise KernelError(
            f"{path} cannot be loaded: {error}; build the kernels with the CUDA toolkit whose "
            "major version torch has (indexcache kernels build)"
        ) from error


def require_aligned(op: str, **tensors: torch.Tensor) -> None:
    """Refuse tensors that are not 16-byte aligned, as TMA and cp.async need them to be.

    Raises:
        KernelError: names the tensor.
    """
    for name, tensor in tensors.items():
        if tensor.data_ptr() % 16:
            raise KernelError(f"{op}: {name} must begin at a multiple of 16 bytes; clone() it")


@cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of SMs of a GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
