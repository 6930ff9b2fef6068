"""Files written in one step, so that no reader sees half of one, and the package's own folders."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sglang_indexcache.errors import OutputError


@contextmanager
def writing(path: Path, *also: type[Exception]) -> Iterator[None]:
    """Run a block that writes ``path``, and turn its failure into an error of one sentence.

    Args:
        also: errors besides OSError that a library raises when a write fails.

    Raises:
        OutputError: the file could not be written.
    """
    failures: tuple[type[Exception], ...] = (OSError, *also)
    try:
        yield
    except failures as error:
        reason = (getattr(error, "strerror", None) or str(error)).splitlines()[0]
        raise OutputError(
            f"cannot write {path}: {reason}. What was written before is whole: make room, or mend "
            "what else is in the way, and give the same command again."
        ) from error


@contextmanager
def replacing(path: Path, *also: type[Exception]) -> Iterator[Path]:
    """Give a file to write to, which takes ``path``'s place in one step when the block ends.

    If that fails, ``path`` is as it was, and nothing of the new file stays. ``also`` is as for
    :func:`writing`.

    Raises:
        OutputError: it could not be written.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        with writing(path, *also):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield part
            os.replace(part, path)
    except BaseException:
        with suppress(OSError):
            part.unlink()  # half a file takes room that the next try needs
        raise


def write_whole(path: Path, text: str) -> None:
    """Replace the file at ``path`` in one step, or raise OutputError."""
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")


def write_json(path: Path, data: Any) -> None:
    """Write ``data`` as indented JSON in one step, or raise OutputError."""
    write_whole(path, json.dumps(data, indent=1) + "\n")


def shipped(folder: str) -> Path:
    """Return the folder ``patterns``, ``csrc`` or ``docs``, installed or in the sources."""
    package = Path(__file__).parents[1]
    inside = package / folder
    return inside if inside.is_dir() else package.parent / folder
