"""The progress bar of long work whose end is known only from above."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn


def progress_at_most(console: Console) -> Progress:
    """A bar that goes when it is done, with the time left at most: the work may end earlier."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("left at most"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, transient=True)
