"""The machine that a benchmark or a GPU test runs on, and whether what was packed fits it."""

import json
import platform
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from benchmarks.card.pack import MANIFEST, sources
from sglang_indexcache import __version__
from sglang_indexcache.kernels.build import FOLDERS, stem_of
from sglang_indexcache.kernels.dispatch import HOPPER
from sglang_indexcache.lab.runs.provenance import commit, output_lines, package_version

PACKAGES = {
    "triton": ("triton",),
    "tvm_ffi": ("apache-tvm-ffi",),
    "deep_gemm": ("deep_gemm", "sgl-deep-gemm"),
    "flash_mla": ("flash_mla", "sgl-flash-mla"),
    "flashinfer": ("flashinfer-python",),
    "sgl_kernel": ("sglang-kernel",),
    "sglang": ("sglang",),
}
"""Who installs what is timed."""
Need: TypeAlias = Literal["card", "hopper", "sglang"]
CLOCKS = "clocks.sm,clocks.mem,power.draw,temperature.gpu"


def lacking(*needs: Need) -> str | None:
    """Return the first of ``needs`` that this machine lacks, in words; or None.

    The card comes first: without it nothing else matters.
    """
    if needs and not torch.cuda.is_available():
        return "needs an NVIDIA GPU (H100 or H200): torch sees none"
    if "hopper" in needs and torch.cuda.get_device_capability() != HOPPER:
        return f"needs an H100 or H200, this is a {torch.cuda.get_device_name()}"
    if "sglang" in needs and find_spec("sglang") is None:
        return "needs SGLang: unpack packages.tar.xz of benchmarks.card.pack"
    return None


def facts() -> dict[str, Any]:
    """Return card, driver, versions, commit."""
    values: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": (packed() or {}).get("commit") or commit() or "unknown",
        "sources": sources(),
        "version": __version__,
        "kernels": _kernels(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "name": "CPU",
        "capability": None,
    }
    for name, packages in PACKAGES.items():
        values[name] = package_version(*packages)
    values["nvcc"] = next(reversed(output_lines(["nvcc", "--version"])), None)
    if torch.cuda.is_available():
        values["driver, max SM clock, power limit"] = _asked(
            "driver_version,clocks.max.sm,power.limit"
        )
        properties = torch.cuda.get_device_properties(0)
        values["name"] = properties.name
        values["capability"] = [properties.major, properties.minor]
        values["multiprocessors"] = properties.multi_processor_count
        values["memory_bytes"] = properties.total_memory
    return values


def _kernels() -> list[str]:
    """Return the digests of our kernels' sources, which stay when a copy's commit is gone."""
    try:
        return [stem_of(folder) for folder in FOLDERS]
    except ImportError:  # apache-tvm-ffi is part of the digest
        return []


def clocks() -> str | None:
    """Read what the card runs at now: SM and memory clock, power, temperature; or None."""
    return _asked(CLOCKS)


def _asked(query: str) -> str | None:
    return next(
        iter(output_lines(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"])), None
    )


def packed() -> dict[str, Any] | None:
    """Read the unpacked archive's manifest (``benchmarks.card.pack``), if one is on the path."""
    path = packed_file(MANIFEST)
    return json.loads(path.read_text()) if path else None


def packed_file(name: str) -> Path | None:
    """Return a file of the unpacked archive's root; None if none on the path has it."""
    places = (Path(place) / name for place in sys.path)
    return next((place for place in places if place.exists()), None)


def preflight(machine: dict[str, Any], archive: dict[str, Any] | None = None) -> str:
    """Say in a line whether this is the machine that the archive was packed for, or what fails.

    Args:
        here: of :func:`facts`.
        archive: its manifest; by default the one on the path.
    """
    archive = archive or packed()
    if archive is None:
        return "no archive is unpacked: what needs a package that is not installed here is skipped"
    version = {
        "python": ".".join(machine["python"].split(".")[:2]),
        "torch": machine["torch"].split("+")[0],
    }
    wrong = [f"{name} {archive[name]}" for name in version if archive[name] != version[name]]
    if not wrong and archive["sources"] != machine["sources"]:
        return "the checkout was changed after the archive was packed: its commit names other code"
    if not wrong:
        return "this is the machine that the archive was packed for"
    versions = ", ".join(f"{name} {version[name]}" for name in version)
    return (
        f"the archive is for {' and '.join(wrong)}, here is {versions}: its compiled packages will "
        "not load, so only what needs torch alone can run; pack it for this machine"
    )
