"""A journal: an append-only file of JSON lines, each on disk before it counts.

The first line says what is being measured; a journal with further lines is continued only by a run
that measures the same. A process that is killed in the middle of a line loses only that line.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

from sglang_indexcache.errors import IndexCacheError
from sglang_indexcache.lab.runs.identity import check_same, check_writable, lock
from sglang_indexcache.library.writing import writing

_FORMAT = 1
_Entry = TypeVar("_Entry")


class Journal(AbstractContextManager["Journal"]):
    """A journal file, locked while it is open.

    Args:
        identity: a description of what is measured, in JSON values.
        kind: the kind of run, for messages ("search").

    Attributes:
        entries: the lines already in the file, without the first.

    Raises:
        IndexCacheError: as ``error``; the file belongs to another run (its identity differs), is
            damaged before its last line, or is in use by another process.
        OutputError: its folder cannot be written.
    """

    def __init__(
        self, path: Path, identity: Mapping[str, Any], kind: str, error: type[IndexCacheError]
    ) -> None:
        self.path, self._kind, self._error = path, kind, error
        self._guard = threading.Lock()
        check_writable(path.parent)
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        self._file = path.open("a+b", buffering=0)  # unbuffered, so each line is written at once
        try:
            lock(self._file, path, kind, error)
            self.entries: list[dict[str, Any]] = list(self._load(dict(identity)))
        except BaseException:
            self._file.close()
            raise
        if is_new:
            _sync_folder(path.parent)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file, which releases its lock."""
        self._file.close()

    def write(self, entry: Mapping[str, Any]) -> None:
        """Add one line, which is on disk when this returns.

        Raises:
            OutputError: the disk is full or cannot be written. Earlier lines stay whole.
        """
        line = json.dumps(entry).encode() + b"\n"
        with self._guard, writing(self.path):
            end = self._file.seek(0, os.SEEK_END)
            try:
                while line:
                    line = line[self._file.write(line) :]
                os.fsync(self._file.fileno())
            except BaseException:
                self._file.truncate(end)  # else the next line would follow half a line
                raise

    def parsed(self, parse: Callable[[dict[str, Any]], _Entry]) -> Iterator[_Entry]:
        """Yield every entry, parsed by ``parse``.

        Raises:
            IndexCacheError: as the journal's ``error``; names the line that lacks something.
        """
        for number, entry in enumerate(self.entries, start=2):
            try:
                yield parse(entry)
            except (KeyError, TypeError, ValueError) as error:
                raise self._damaged(number) from error

    def _load(self, identity: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self._file.seek(0)
        text = self._file.read()
        complete, _, torn = text.rpartition(b"\n")
        if torn:  # the process was killed in the middle of this line
            self._file.truncate(len(complete) + 1 if complete else 0)
        lines = complete.split(b"\n") if complete else []
        header = self._read(lines[0], 1) if lines else {"format": _FORMAT}
        if len(lines) < 2 and header.get("format") == _FORMAT:
            # Nothing was measured yet, so the next run may measure something else.
            self._file.truncate(0)
            self.write({"format": _FORMAT, "identity": identity})
            return
        self._check_header(header, identity)
        for number, line in enumerate(lines[1:], start=2):
            yield self._read(line, number)

    def _read(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise self._damaged(number) from error
        if not isinstance(entry, dict):
            raise self._damaged(number)
        return entry

    def _damaged(self, number: int) -> IndexCacheError:
        return self._error(
            f"{self.path} is damaged at line {number}. Cut it there to keep what is before, or "
            "give another --output."
        )

    def _check_header(self, header: Mapping[str, Any], identity: dict[str, Any]) -> None:
        if header.get("format") != _FORMAT or "identity" not in header:
            raise self._error(
                f"{self.path} is not a journal of this version for this {self._kind}. Move it away."
            )
        check_same(header["identity"], identity, path=self.path, kind=self._kind, error=self._error)


def _sync_folder(folder: Path) -> None:
    """Make a new file's name durable, not only its content."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
