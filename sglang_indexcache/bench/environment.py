"""Where and when a figure was measured, and whether anything else was running."""

from __future__ import annotations

import os
import time
from pathlib import Path

from sglang_indexcache.library import Strict
from sglang_indexcache.study.provenance import machine

_STAT = Path("/proc/stat")


class Environment(Strict):
    """The machine and the software of one measurement.

    Attributes:
        date: UTC, to the second.
        cpu: model name of the processor.
        cores: logical CPUs.
        gpus: name and driver of each GPU, empty on a machine without.
        versions: of Python and of every package that decides a speed.
        commit: of this repository, with "+" if files were changed; empty outside a checkout.
        load_before: 1-minute load average before anything was started.
    """

    date: str
    cpu: str
    cores: int
    gpus: tuple[str, ...]
    versions: dict[str, str]
    commit: str
    load_before: float


def environment() -> Environment:
    """This machine, now."""
    return Environment(**machine())


def busy_cores(seconds: float = 1.0) -> float | None:
    """How many cores' worth of work the machine does right now; None where Linux cannot tell.

    Args:
        seconds: how long to watch.
    """
    before = _ticks()
    time.sleep(seconds)
    after = _ticks()
    if before is None or after is None:
        return None
    total, idle = after[0] - before[0], after[1] - before[1]
    return round((os.cpu_count() or 1) * (1 - idle / max(1, total)), 2)


def _ticks() -> tuple[int, int] | None:
    """Clock ticks of all CPUs since boot: ``(all, idle)``."""
    if not _STAT.exists():
        return None
    fields = [int(field) for field in _STAT.read_text().splitlines()[0].split()[1:]]
    return sum(fields[:8]), fields[3] + fields[4]
