"""Where and when a figure was measured, and whether anything else was running."""

from __future__ import annotations

import os
import time
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from sglang_indexcache.errors import BenchError
from sglang_indexcache.study.provenance import machine

_STAT = Path("/proc/stat")


class Environment(BaseModel):
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

    model_config = ConfigDict(extra="forbid", frozen=True)

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


class ProcessorClock:
    """Processor seconds of the scheduler of a server on this machine, read by Linux's accounting.

    With one thread a rank this is what the wall clock would show if nothing else ran: the clock
    for a CPU that others use. On several ranks it is their mean.

    Args:
        group: process group of the server.

    Raises:
        BenchError: no scheduler is in it, or this is not Linux.
    """

    def __init__(self, group: int) -> None:
        members = (entry for entry in Path("/proc").glob("[0-9]*") if _group(entry) == group)
        found = [entry for entry in members if "scheduler" in _command(entry)]
        self._files = [entry / "schedstat" for entry in found]
        if not self._files or not all(file.exists() for file in self._files):
            raise BenchError("the processor clock needs Linux and servers that are started here")

    def __call__(self) -> float:
        """Seconds that the schedulers' main threads have run, the mean."""
        return (
            sum(int(file.read_text().split()[0]) for file in self._files) / 1e9 / len(self._files)
        )


def _group(entry: Path) -> int | None:
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[2])
    except OSError:
        return None


def _command(entry: Path) -> str:
    try:
        return (entry / "cmdline").read_text(errors="replace")
    except OSError:
        return ""


def _ticks() -> tuple[int, int] | None:
    """Clock ticks of all CPUs since boot: ``(all, idle)``."""
    if not _STAT.exists():
        return None
    fields = [int(field) for field in _STAT.read_text().splitlines()[0].split()[1:]]
    return sum(fields[:8]), fields[3] + fields[4]
