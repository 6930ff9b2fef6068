"""Text that every machine with Python has."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path


def machine_text(limit: int) -> Iterator[str]:
    """Yield the standard library's sources by file name, at most ``limit`` characters."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    remaining = limit
    for path in sorted(folder.glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="ignore")[:remaining]
        remaining -= len(text)
        yield text
        if remaining <= 0:
            return
