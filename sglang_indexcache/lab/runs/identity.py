"""Ownership of a run's files, by one process at a time and by one identity for good.

An identity describes what a run measures, in JSON values. Two runs with the same identity continue
each other.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, Any

from sglang_indexcache.errors import IndexCacheError, OutputError
from sglang_indexcache.library.writing import write_json, writing

GIVEN = "given"
"""Key in an identity for the options that led to it, which explain a difference but do not count as
one."""
_SHORT = 100
_HASH = re.compile(r"[0-9a-f]{40,}")


def lock(file: IO[bytes], path: Path, kind: str, error: type[IndexCacheError]) -> None:
    """Lock an open file for this process alone, until it is closed.

    Args:
        path: the file's path, and ``kind`` the kind of run, for messages.

    Raises:
        IndexCacheError: as ``error``; another process has locked it.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise error(
            f"{path} is in use by another {kind}. Wait for it, or give another --output."
        ) from None


@contextmanager
def locked(path: Path, kind: str, error: type[IndexCacheError]) -> Iterator[None]:
    """Hold the lock file ``path``, created if missing, while the block runs; see :func:`lock`."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
    with file:
        lock(file, path, kind, error)
        yield


def differences(then: Mapping[str, Any], now: Mapping[str, Any], of: str = "") -> Iterator[str]:
    """Yield the names of fields that differ between two identities, with short values."""
    for name in sorted({*then, *now}):
        old, new = then.get(name), now.get(name)
        if old == new:
            continue
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from differences(old, new, f"{of}{name} ")
        elif max(len(repr(old)), len(repr(new))) > _SHORT or _HASH.fullmatch(str(new)):
            yield f"{of}{name}"
        else:
            yield f"{of}{name} ({old!r} then, {new!r} now)"


def _without_options(identity: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in identity.items() if name != GIVEN}


def check_same(
    then: Mapping[str, Any],
    now: Mapping[str, Any],
    *,
    path: Path,
    kind: str,
    error: type[IndexCacheError],
) -> None:
    """Refuse to continue a run whose identity ``then`` differs from the requested ``now``.

    Raises:
        IndexCacheError: as ``error``; the two differ.
    """
    different = list(differences(_without_options(then), _without_options(now)))
    if different:
        if GIVEN in then and GIVEN in now:
            different += differences(then[GIVEN], now[GIVEN])
        raise error(
            f"{path} belongs to another {kind}; different: {'; '.join(different)}. "
            "Give the same options to continue it, or another --output."
        )


def claim(path: Path, identity: Mapping[str, Any], kind: str, error: type[IndexCacheError]) -> None:
    """Write a run's identity to the JSON file at ``path``, or check that it holds the same one.

    Raises:
        IndexCacheError: as ``error``; the file belongs to another run, or is damaged.
        OutputError: the folder cannot be written.
    """
    check_writable(path.parent)
    if not path.exists():
        write_json(path, dict(identity))
        return
    try:
        then = dict(json.loads(path.read_text()))
    except (TypeError, ValueError) as damaged:
        raise error(f"{path} is damaged. Give another --output.") from damaged
    check_same(then, json.loads(json.dumps(identity)), path=path, kind=kind, error=error)


def check_writable(folder: Path) -> None:
    """Write a trial file before anything is measured, in the folder or where it would be made.

    Raises:
        OutputError: no file can be written there.
    """
    place = next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))
    try:
        with NamedTemporaryFile(dir=place, prefix=".indexcache-") as probe:
            probe.write(bytes(4096))
            probe.flush()
    except OSError as error:
        raise OutputError(
            f"cannot write to the folder {folder} (--output): {error.strerror}. Give another one."
        ) from error
