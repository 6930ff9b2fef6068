"""A long run as its user sees it: a progress bar, and an end at any time that loses nothing."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn


@contextmanager
def resumable(console: Console, output: Path, what: str = "what was done") -> Iterator[None]:
    """A block that Ctrl-C or SIGTERM may end; says that the same command continues it.

    A batch system ends a job with SIGTERM: the same as Ctrl-C here.

    Args:
        console: where to say it.
        output: folder of the run.
        what: is in that folder after an interruption.

    Raises:
        KeyboardInterrupt: the run was interrupted.
    """
    with sigterm_interrupts():
        try:
            yield
        except KeyboardInterrupt:
            console.print(
                f"interrupted: {what} is in {output}; the same command continues",
                highlight=False,
            )
            raise


def resuming(console: Console, count: int, things: str, path: Path) -> None:
    """Say how much of the run is in ``path`` already; nothing where that is none."""
    if count:
        console.print(f"resuming: {count:,} {things} in {path}", highlight=False)


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """A block that SIGTERM ends as Ctrl-C does, by KeyboardInterrupt."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def progress_at_most(console: Console) -> Progress:
    """A bar with the most time that may be left: the work may end earlier. It goes when done."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("left at most"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, transient=True)
