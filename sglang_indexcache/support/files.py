"""Files that a reader never sees half written, and those that ship with the package."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write to, which takes the place of ``path`` in one step when the block ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    yield part
    os.replace(part, path)


def write_whole(path: Path, text: str) -> None:
    """Replace the file at ``path`` in one step."""
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")


def write_json(path: Path, data: Any) -> None:
    """Write ``data`` readably; a reader never sees half a file."""
    write_whole(path, json.dumps(data, indent=1) + "\n")


def shipped(folder: str) -> Path:
    """``patterns`` or ``csrc``: inside an installed package, or beside it in a source tree."""
    package = Path(__file__).parents[1]
    inside = package / folder
    return inside if inside.is_dir() else package.parent / folder
