"""Processes that tests interrupt, and who is left of a group of them."""

from __future__ import annotations

import signal
from pathlib import Path


def hears_sigint() -> None:
    """Undo an inherited SIG_IGN: a shell's background jobs, and so their children, have one."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def group_members(group: int) -> list[int]:
    """Return the processes of one process group that are not zombies."""
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == group and fields[0] != "Z":
                members.append(int(entry.name))
    return members
