"""Text that a user sees before a long run: what it will do, and how long that takes."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console


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
