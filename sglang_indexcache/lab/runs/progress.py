"""Text for the user of a long run: what it will do, how far it is, and how to continue it."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

LINE_EVERY = 30.0
"""Seconds between two lines of progress where there is no terminal."""
SPEED_OVER = 600.0
"""Seconds of past work from which the remaining time is estimated: one long context takes a
minute."""


def time_in_words(hours: float) -> str:
    """Return a duration as text, in the unit that a person would choose."""
    if hours >= 1:
        return f"{hours:.2g} hours"
    return f"{hours * 60:.0f} minutes" if hours > 1 / 40 else f"{hours * 3600:.0f} seconds"


def print_plan(console: Console, rows: Iterable[tuple[str, str]]) -> None:
    """Print what a run will do: a name and a sentence in each row, with the names in one column."""
    lines = list(rows)
    width = max((len(name) for name, _ in lines), default=0) + 2
    for name, text in lines:
        console.print(f"{name:<{width}}{text}", highlight=False, soft_wrap=True, markup=False)


@contextmanager
def resumable(console: Console, output: Path, what: str = "what was done") -> Iterator[None]:
    """Let Ctrl-C or SIGTERM end the block, and say that the same command continues it.

    A batch system ends a job with SIGTERM, which acts like Ctrl-C here. The message says that
    ``what`` is in the folder.

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
    """Print how much of the run is already in ``path``; print nothing if there is none."""
    if count:
        console.print(f"resuming: {count:,} {things} in {path}", highlight=False)


class _LinesWithoutTerminal(Progress):
    """Progress bar that prints a line now and then in a file or a pod's log."""

    _next: float | None = None

    def update(self, task_id: TaskID, *args: Any, **changes: Any) -> None:
        """Update as Progress does, and print a line if one is due."""
        super().update(task_id, *args, **changes)
        self._tell(task_id)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        """Update as Progress does, and print a line if one is due."""
        super().advance(task_id, advance)
        self._tell(task_id)

    def _tell(self, number: TaskID) -> None:
        if self.console.is_terminal or self.console.is_jupyter:
            return
        now, due = time.monotonic(), self._next
        if due is not None and now < due:
            return
        self._next = now + LINE_EVERY
        if due is None:  # the run has only begun
            return
        task = next(task for task in self.tasks if task.id == number)
        seconds = task.time_remaining
        remaining = "" if seconds is None else f", {time_in_words(seconds / 3600)} left at most"
        self.console.print(
            f"{task.description}: {task.percentage:.0f} %{remaining}", highlight=False, markup=False
        )


def progress_at_most(console: Console) -> Progress:
    """Make a bar that shows the most time that may be left, and disappears at the end.

    Without a terminal it prints a line now and then.
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
