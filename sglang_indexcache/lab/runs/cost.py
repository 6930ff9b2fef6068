"""Cost of a long run, told before it begins: tokens, hours, and where the rate comes from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rich.console import Console

_SECONDS = 3600.0


@dataclass(frozen=True)
class Rate:
    """Rate at which tokens are computed.

    Attributes:
        tokens_per_second: of everything that works at the same time, taken to be always busy.
        source: where the figure comes from, for a reader: "given by --rate".
    """

    tokens_per_second: float
    source: str


@dataclass(frozen=True)
class Cost:
    """The bill of a run: tokens at most, and how fast, if anybody knows."""

    tokens: int
    rate: Rate | None = None

    @property
    def hours(self) -> float | None:
        """Wall-clock hours at most; None without a rate."""
        return None if self.rate is None else self.tokens / self.rate.tokens_per_second / _SECONDS

    def in_words(self) -> str:
        """Say tokens, hours and the rate's source in one sentence."""
        return f"{self.tokens:,} tokens at most, {self.hours_in_words()}"

    def hours_in_words(self) -> str:
        """Say the hours and where the rate comes from; without one, how to get it."""
        if self.rate is None or self.hours is None:
            return "hours not known yet: give --rate, the tokens computed in a second"
        speed = f"{self.rate.tokens_per_second:,.0f} tokens a second"
        return f"{time_in_words(self.hours)} at {speed} ({self.rate.source})"


def time_in_words(hours: float) -> str:
    """Say how long something takes in the unit that a person would choose."""
    if hours >= 1:
        return f"{hours:.2g} hours"
    return f"{hours * 60:.0f} minutes" if hours > 1 / 40 else f"{hours * _SECONDS:.0f} seconds"


def print_plan(console: Console, rows: Iterable[tuple[str, str]]) -> None:
    """Write what a run will do: a name and a sentence in each row, the names in one column."""
    lines = list(rows)
    width = max((len(name) for name, _ in lines), default=0) + 2
    for name, text in lines:
        console.print(f"{name:<{width}}{text}", highlight=False, soft_wrap=True, markup=False)
