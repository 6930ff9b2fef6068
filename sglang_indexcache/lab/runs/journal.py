"""A journal: an append-only file of JSON lines, each on disk before it counts.

The first line says what is being measured; a journal that has more is only ever continued by
whoever measures the same. A process that is killed in the middle of a line loses that line and
nothing else. To its user a long run is a progress bar, and an end at any time that loses nothing.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from sglang_indexcache.errors import IndexCacheError
from sglang_indexcache.lab.runs.cost import time_in_words
from sglang_indexcache.library.writing import check_writable, write_json, writing

GIVEN = "given"
"""Key of an identity for the options that led to it: they explain a difference and make none."""
LINE_EVERY = 30.0
"""Seconds between two lines of progress where there is no terminal."""
SPEED_OVER = 600.0
"""Seconds of work that the time left is reckoned from: one long context takes a minute."""
_SHORT = 100
_HASH = re.compile(r"[0-9a-f]{40,}")
_FORMAT = 1
_Entry = TypeVar("_Entry")


class Journal(AbstractContextManager["Journal"]):
    """A journal file, locked while it is open.

    Args:
        identity: what is measured, JSON values.
        kind: what one journal is of, for messages ("search").

    Attributes:
        entries: the lines that are there already, without the first.

    Raises:
        IndexCacheError: as ``error``: the file is another's (its identity differs), damaged before
            its last line, or in use by another process.
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
        self._file = path.open("a+b", buffering=0)  # no line waits for the one behind it
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
        """Let others have the file."""
        self._file.close()

    def write(self, entry: Mapping[str, Any]) -> None:
        """Add one line; on disk when this returns.

        Raises:
            OutputError: the disk is full, or takes no more. The lines before are whole.
        """
        line = json.dumps(entry).encode() + b"\n"
        with self._guard, writing(self.path):
            end = self._file.seek(0, os.SEEK_END)
            try:
                while line:
                    line = line[self._file.write(line) :]
                os.fsync(self._file.fileno())
            except BaseException:
                self._file.truncate(end)  # another thread's line would stand behind half of one
                raise

    def parsed(self, parse: Callable[[dict[str, Any]], _Entry]) -> Iterator[_Entry]:
        """Yield every entry as ``parse`` understands it.

        Raises:
            IndexCacheError: as the journal's: naming the line that lacks something.
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
        if torn:  # killed in the middle of a line: that entry never finished
            self._file.truncate(len(complete) + 1 if complete else 0)
        lines = complete.split(b"\n") if complete else []
        header = self._read(lines[0], 1) if lines else {"format": _FORMAT}
        if len(lines) < 2 and header.get("format") == _FORMAT:
            # Nothing was measured, so nothing is mixed: whoever comes next may measure another.
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


def lock(file: IO[bytes], path: Path, kind: str, error: type[IndexCacheError]) -> None:
    """Have an open file for this process alone, until it is closed.

    Args:
        path: the file's, and ``kind`` what it is of, for messages.

    Raises:
        IndexCacheError: as ``error``: another process has it.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise error(
            f"{path} is in use by another {kind}. Wait for it, or give another --output."
        ) from None


@contextmanager
def locked(path: Path, kind: str, error: type[IndexCacheError]) -> Iterator[None]:
    """Hold the lock file ``path``, made if missing, while the block runs; see :func:`lock`."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
    with file:
        lock(file, path, kind, error)
        yield


def _sync_folder(folder: Path) -> None:
    """Make a new file's name durable, not only its content."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def differences(then: Mapping[str, Any], now: Mapping[str, Any], of: str = "") -> Iterator[str]:
    """Yield what differs between two identities, by name; no long values and no hashes."""
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
    """Refuse to continue a run that was begun with ``then``, if ``now`` is asked for and differs.

    Raises:
        IndexCacheError: as ``error``: the two differ.
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
    """Make the JSON file at ``path`` say what is run beside it, or find that it says the same.

    Raises:
        IndexCacheError: as ``error``: the file belongs to another run, or is damaged.
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


@contextmanager
def resumable(console: Console, output: Path, what: str = "what was done") -> Iterator[None]:
    """Let Ctrl-C or SIGTERM end the block, and say that the same command continues it.

    A batch system ends a job with SIGTERM: the same as Ctrl-C here. ``what`` is in the folder then.

    Raises:
        KeyboardInterrupt: the run was interrupted.
    """
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        console.print(
            f"interrupted: {what} is in {output}; the same command continues", highlight=False
        )
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def resuming(console: Console, count: int, things: str, path: Path) -> None:
    """Say how much of the run is in ``path`` already; nothing where that is none."""
    if count:
        console.print(f"resuming: {count:,} {things} in {path}", highlight=False)


class _LinesWithoutTerminal(Progress):
    """A bar that, in a file or a pod's log, is a line now and then: there nobody sees it drawn."""

    _next: float | None = None

    def update(self, task_id: TaskID, *args: Any, **changes: Any) -> None:
        """Do as Progress does, and tell."""
        super().update(task_id, *args, **changes)
        self._tell(task_id)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        """Do as Progress does, and tell."""
        super().advance(task_id, advance)
        self._tell(task_id)

    def _tell(self, number: TaskID) -> None:
        if self.console.is_terminal or self.console.is_jupyter:
            return
        now, due = time.monotonic(), self._next
        if due is not None and now < due:
            return
        self._next = now + LINE_EVERY
        if due is None:  # it has only begun
            return
        task = next(task for task in self.tasks if task.id == number)
        seconds = task.time_remaining
        remaining = "" if seconds is None else f", {time_in_words(seconds / 3600)} left at most"
        self.console.print(
            f"{task.description}: {task.percentage:.0f} %{remaining}", highlight=False, markup=False
        )


def progress_at_most(console: Console) -> Progress:
    """Make a bar with the most time that may be left: work may end earlier. It goes when done.

    Without a terminal it is a line now and then.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("left at most"),
        TimeRemainingColumn(),
    )
    return _LinesWithoutTerminal(
        *columns, console=console, transient=True, speed_estimate_period=SPEED_OVER
    )
