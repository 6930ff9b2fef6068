"""Provenance of numbers: machine, software and commit. Standard library only."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sglang_indexcache import __version__

_PACKAGES = ("sglang", "torch", "transformers")
_ROOT = Path(__file__).parents[3]
_CPUINFO, _STAT = Path("/proc/cpuinfo"), Path("/proc/stat")


def versions() -> dict[str, str]:
    """Return the versions of everything that can change a loss or a speed."""
    software = {"sglang-indexcache": __version__, "python": platform.python_version()}
    packages = {name: package_version(name) for name in _PACKAGES}
    return software | {name: number for name, number in packages.items() if number is not None}


def package_version(*names: str) -> str | None:
    """Return the version of the first installed package among these, without importing any."""
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def machine() -> dict[str, Any]:
    """Describe this machine and its software at this moment.

    The keys are ``date`` (UTC, to the second), ``cpu`` (model name), ``cores`` (logical CPUs),
    ``gpus`` (name and driver of each; empty without GPUs), ``versions``, ``commit`` and
    ``load_before`` (the 1-minute load average).
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
    """Measure how many cores are busy now; None if it is not Linux."""
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
    """Return this checkout's commit, with "+" if files have changed.

    Outside a checkout it is the value of ``INDEXCACHE_COMMIT``, or "".
    """
    git = ["git", "-C", str(_ROOT)]
    revision = output_lines([*git, "rev-parse", "--short=12", "HEAD"])
    if not revision:
        return os.environ.get("INDEXCACHE_COMMIT", "")
    changed = output_lines([*git, "status", "--porcelain", "--untracked-files=no"])
    return revision[0] + ("+" if changed else "")


def output_lines(command: list[str]) -> list[str]:
    """Return the lines that a command prints; none if it fails or is missing."""
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
