"""Our kernels for Hopper (sm_90a): thin loaders of ``csrc/``.

Nothing here has run on a GPU yet: the kernels are compiled, their layout and selection code is
tested on the host, and they were reviewed by hand (csrc/README.md).
"""

from functools import cache
from typing import Any

import torch

from sglang_indexcache.errors import KernelError
from sglang_indexcache.kernels import compilers
from sglang_indexcache.kernels.build import ARCHITECTURE, FOLDERS, cached, nvcc_version

CAPABILITY = (9, 0)


def unavailable() -> str | None:
    """Why the kernels cannot be built or loaded on this machine, or None; no GPU is needed.

    Libraries that were built ahead (``indexcache kernels build``) need no nvcc.
    """
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


def doubt() -> str | None:
    """Why ``auto`` takes none of the kernels, though they can be built or loaded here; or None."""
    try:
        built = [cached(folder) for folder in FOLDERS]
        versions = {one.compiler if one else nvcc_version() for one in built}
    except KernelError:
        return None  # they cannot be built: :func:`unavailable` says why
    return next(filter(None, map(compilers.doubt, sorted(versions))), None)


@cache
def library(folder: str) -> Any:
    """The loaded library of one folder of ``csrc/``; compiled first if the cache lacks it.

    Raises:
        KernelError: no nvcc, the compilation failed, or what was built cannot be loaded.
    """
    import tvm_ffi

    from sglang_indexcache.kernels.build import build  # here, so as not to hide the module

    path = build(folder).path
    try:
        return tvm_ffi.load_module(str(path))
    except (OSError, RuntimeError) as error:
        raise KernelError(
            f"{path} cannot be loaded: {error}; build the kernels with the CUDA toolkit whose "
            "major version torch has (indexcache kernels build)"
        ) from error


def require_hopper(op: str, device: torch.device) -> None:
    """Refuse a device that the kernels are not compiled for, before anything is compiled.

    Raises:
        KernelError: not a GPU, or not of compute capability 9.0.
    """
    if device.type != "cuda":
        raise KernelError(f"{op}: the CUDA kernels need tensors on an NVIDIA GPU, not on {device}")
    found = torch.cuda.get_device_capability(device)
    if found != CAPABILITY:
        raise KernelError(
            f"{op}: the CUDA kernels are compiled for {ARCHITECTURE} (H100, H200), this is a "
            f"{torch.cuda.get_device_name(device)} (compute capability {found[0]}.{found[1]}); "
            "use the triton implementation"
        )


def require_aligned(op: str, **tensors: torch.Tensor) -> None:
    """Refuse what the kernels cannot read 16 bytes at a time (TMA, cp.async).

    Raises:
        KernelError: a tensor, by name, that begins elsewhere; only a view with an odd offset does.
    """
    for name, tensor in tensors.items():
        if tensor.data_ptr() % 16:
            raise KernelError(f"{op}: {name} must begin at a multiple of 16 bytes; clone() it")


@cache
def multiprocessors(device: torch.device) -> int:
    """SMs of a GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
