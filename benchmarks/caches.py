"""Files and folders that a benchmark makes once and keeps, by one process while others wait."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock


def kept(path: Path, make: Callable[[Path], object]) -> Path:
    """Return ``path``, a file or a folder, and let ``make`` write it first if it is not there.

    ``make`` gets a path beside it, and what it wrote takes ``path``'s place when it returns. So
    nothing that a killed process left is taken for the whole.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f".{path.name}.lock")):
        if not path.exists():
            part = path.with_name(f".{path.name}.part")
            shutil.rmtree(part, ignore_errors=True)
            make(part)
            part.rename(path)
    return path
