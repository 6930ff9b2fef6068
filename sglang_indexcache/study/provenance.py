"""Provenance of numbers: weights, machine, software. Standard library only."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import time
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sglang_indexcache import __version__
from sglang_indexcache.errors import CheckpointError

_WHOLE_BYTES, _SAMPLE_BYTES = 16 << 20, 4 << 10
_PACKAGES = ("sglang", "torch", "transformers")
_ROOT = Path(__file__).parents[2]
_CPUINFO, _STAT = Path("/proc/cpuinfo"), Path("/proc/stat")


def checkpoint_digest(folder: Path) -> str:
    """Compute a SHA-256 that tells checkpoints apart without reading them whole.

    Covers config.json and of each .safetensors file its name, its size, its header (every
    tensor's name, dtype, shape and place) and the 4 KiB in the middle of every tensor; all of a
    file of at most 16 MiB. So it tells trained weights from others of the same shapes, whichever
    tensors were trained. It misses a change within one tensor of a larger file that spares those
    4 KiB, such as a few edited rows; and the same weights in other files count as others.

    Raises:
        CheckpointError: the folder has no config.json or no .safetensors file, or one of these
            is damaged.
    """
    config, weights = folder / "config.json", sorted(folder.glob("*.safetensors"))
    if not config.exists() or not weights:
        raise CheckpointError(
            f"{folder} is not a checkpoint: it needs config.json and *.safetensors"
        )
    content = hashlib.sha256(config.read_bytes())
    for path in weights:
        size = path.stat().st_size
        content.update(f"{path.name}:{size}\n".encode())
        for block in _blocks(path, size):
            content.update(block)
    return content.hexdigest()


def _blocks(path: Path, size: int) -> Iterable[bytes]:
    with path.open("rb") as file:
        if size <= _WHOLE_BYTES:
            yield file.read()
            return
        length = int.from_bytes(file.read(8), "little")
        header = file.read(min(length, size))
        yield header
        for start, end in _tensor_bytes(path, header):
            file.seek(8 + length + max(start, (start + end - _SAMPLE_BYTES) // 2))
            yield file.read(min(_SAMPLE_BYTES, end - start))


def _tensor_bytes(path: Path, header: bytes) -> list[tuple[int, int]]:
    """Return where each tensor starts and ends behind a safetensors header, in that order."""
    try:
        tensors = json.loads(header)
        tensors.pop("__metadata__", None)
        return sorted(tuple(tensor["data_offsets"]) for tensor in tensors.values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a safetensors file; download it again") from error


def versions() -> dict[str, str]:
    """Return the versions of everything that can change a loss or a speed."""
    software = {"sglang-indexcache": __version__, "python": platform.python_version()}
    packages = {name: package_version(name) for name in _PACKAGES}
    return software | {name: number for name, number in packages.items() if number is not None}


def package_version(*names: str) -> str | None:
    """Return the version of the first of these packages that is installed; import none."""
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def machine() -> dict[str, Any]:
    """Describe this machine and its software, now.

    ``date`` (UTC, to the second), ``cpu`` (model name), ``cores`` (logical CPUs), ``gpus`` (name
    and driver of each, empty without), ``versions``, ``commit`` and ``load_before`` (the 1-minute
    load average).
    """
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "cpu": _cpu(),
        "cores": os.cpu_count() or 1,
        "gpus": tuple(line.strip() for line in output_lines(query)),
        "versions": versions(),
        "commit": commit(),
        "load_before": round(os.getloadavg()[0], 2),
    }


def busy_cores(seconds: float = 1.0) -> float | None:
    """Measure how many cores' worth of work the machine does now; None where Linux cannot tell."""
    before = _ticks()
    time.sleep(seconds)
    after = _ticks()
    if before is None or after is None:
        return None
    total, idle = after[0] - before[0], after[1] - before[1]
    return round((os.cpu_count() or 1) * (1 - idle / max(1, total)), 2)


def _ticks() -> tuple[int, int] | None:
    """Return the clock ticks of all CPUs since boot: ``(all, idle)``."""
    if not _STAT.exists():
        return None
    fields = [int(field) for field in _STAT.read_text().splitlines()[0].split()[1:]]
    return sum(fields[:8]), fields[3] + fields[4]


def commit() -> str:
    """Return this checkout's commit, with "+" if files were changed.

    Outside a checkout the value of ``INDEXCACHE_COMMIT``, or nothing.
    """
    git = ["git", "-C", str(_ROOT)]
    revision = output_lines([*git, "rev-parse", "--short=12", "HEAD"])
    if not revision:
        return os.environ.get("INDEXCACHE_COMMIT", "")
    changed = output_lines([*git, "status", "--porcelain", "--untracked-files=no"])
    return revision[0] + ("+" if changed else "")


def output_lines(command: list[str]) -> list[str]:
    """Return the lines that a command prints; none if it fails or is not there."""
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return process.stdout.strip().splitlines()


def _cpu() -> str:
    if _CPUINFO.exists():
        for line in _CPUINFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
