"""The record of every finished evaluation: append-only, on disk before it counts.

One JSON object a line. The first line says what was measured (checkpoint, data, evaluator); each
other line is one finished evaluation. Nothing about the algorithm is in it: an algorithm is
deterministic, so running it again over a journal gives the answer that an uninterrupted run would
have given, and every method can use every other method's evaluations.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from sglang_indexcache.errors import SearchError

_FORMAT = 1


@dataclass(frozen=True)
class Record:
    """One finished evaluation.

    Attributes:
        pattern: the F/S string.
        batches: calibration batch numbers.
        losses: nats per token of each of them; JSON keeps every bit of a float64.
        layer_tokens: what it cost, tokens times layers.
        seconds: how long it took, for the estimate of what is left.
    """

    pattern: str
    batches: tuple[int, ...]
    losses: tuple[float, ...]
    layer_tokens: int
    seconds: float


class Journal:
    """A journal file, locked while it is open.

    Raises:
        SearchError: the file is another search's (checkpoint, data or evaluator differ), damaged
            before its last line, or in use by another process.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        self.path = path
        self._guard = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        self._file = path.open("a+b")
        try:
            self._lock()
            self.records: list[Record] = list(self._load(dict(identity)))
        except BaseException:
            self._file.close()
            raise
        if is_new:
            _sync_folder(path.parent)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def append(self, record: Record) -> None:
        """Write one finished evaluation; on disk when this returns."""
        self._write(asdict(record) | {"seconds": round(record.seconds, 3)})

    def _write(self, line: Mapping[str, Any]) -> None:
        with self._guard:
            self._file.write(json.dumps(line).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SearchError(
                f"{self.path} is in use by another search. Wait for it, or give another --output."
            ) from None

    def _load(self, identity: dict[str, Any]) -> Iterator[Record]:
        self._file.seek(0)
        text = self._file.read()
        whole, _, torn = text.rpartition(b"\n")
        if torn:  # killed in the middle of a line: that evaluation never finished
            self._file.truncate(len(whole) + 1 if whole else 0)
        lines = whole.split(b"\n") if whole else []
        if not lines:
            self._write({"format": _FORMAT, "identity": identity})
            return
        self._check_header(self._parse(lines[0], 1), identity)
        for number, line in enumerate(lines[1:], start=2):
            entry = self._parse(line, number)
            try:
                yield Record(
                    entry["pattern"],
                    tuple(entry["batches"]),
                    tuple(entry["losses"]),
                    entry["layer_tokens"],
                    entry["seconds"],
                )
            except KeyError as error:
                raise self._damaged(number) from error

    def _parse(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise self._damaged(number) from error
        if not isinstance(entry, dict):
            raise self._damaged(number)
        return entry

    def _damaged(self, number: int) -> SearchError:
        return SearchError(
            f"{self.path} is damaged at line {number}. Cut it there to keep what is before, or "
            "give another --output."
        )

    def _check_header(self, header: Mapping[str, Any], identity: dict[str, Any]) -> None:
        if header.get("format") != _FORMAT:
            raise SearchError(f"{self.path} is not a search journal of this version. Move it away.")
        recorded = header["identity"]
        different = [
            f"{name} ({recorded.get(name)!r} then, {identity.get(name)!r} now)"
            for name in sorted({*recorded, *identity})
            if recorded.get(name) != identity.get(name)
        ]
        if different:
            raise SearchError(
                f"{self.path} belongs to another search; different: {'; '.join(different)}. Give "
                "another --output, or move the journal away."
            )


def _sync_folder(folder: Path) -> None:
    """Make a new file's name durable, not only its content."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
