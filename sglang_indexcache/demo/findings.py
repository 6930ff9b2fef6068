"""What the demo saw, and how it is told.

A figure is printed only if its own spread supports it. The rule is one of ranges, because a few
rounds on a machine that does other things as well give no normal distribution to reckon with.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from sglang_indexcache.ask.client import Client
from sglang_indexcache.ask.protocol import RankState
from sglang_indexcache.demo.material import DemoQuestion

MIN_ROUNDS = 6
"""Servers of equal speed give six ratios on one side of 1 in 1 of 32 demos; three, in 1 of 4."""
WIDEST = 1.5
"""Highest ratio over lowest, beyond which only their range is told."""
QUIET_CORES = 0.3
"""Cores' worth of foreign work that a measurement hardly feels."""
UNSHOWN = "no difference shown"


def times_faster(base: Sequence[float], other: Sequence[float]) -> str:
    """How many times faster ``other`` was: the median ratio, its range, or that nothing was shown.

    Args:
        base: seconds of each round, above zero.
        other: those of the other server, in the same order.
    """
    ratios = [slow / fast for slow, fast in zip(base, other, strict=True)]
    low, high = min(ratios), max(ratios)
    between = f"{low:.2f}x to {high:.2f}x"
    if len(ratios) < MIN_ROUNDS or low <= 1 <= high:
        return f"{UNSHOWN} ({between})"
    if high > WIDEST * low:
        return f"{between}, too unsteady for one number"
    return f"{median(ratios):.2f}x ({between})"


@dataclass
class Contender:
    """One server and what it did.

    Attributes:
        name: for the reader.
        client: of the server.
        said: its answer to each question.
        prefill: seconds from the prompt to the first token, one a round.
        per_token: seconds for each token after the first, one a round.
        state: what IndexCache on the server reports.
    """

    name: str
    client: Client
    said: list[str] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)
    per_token: list[float] = field(default_factory=list)
    state: RankState | None = None


@dataclass
class DemoFindings:
    """Everything that one demo saw.

    Attributes:
        base: the server that runs every indexer.
        other: the server that shares.
        asked: the questions that both answered.
        prompt_tokens: of every timed prompt.
        busy: cores that other programs kept busy before each round; None where unknown.
    """

    base: Contender
    other: Contender
    asked: Sequence[DemoQuestion]
    prompt_tokens: int
    busy: list[float | None]

    def __post_init__(self) -> None:
        self.both = base, other = self.base, self.other
        self.prefill = times_faster(base.prefill, other.prefill)
        self.decode = times_faster(base.per_token, other.per_token)
        answers = [question.answer for question in self.asked]
        said = zip(base.said, other.said, answers, strict=True)
        self.right = [(a == answer, b == answer) for a, b, answer in said]

    def record(self) -> dict[str, Any]:
        """Every sample, for a file."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "servers": [
                {
                    "name": one.name,
                    "said": one.said,
                    "prefill": one.prefill,
                    "per_token": one.per_token,
                    "state": one.state and one.state.to_json(),
                }
                for one in self.both
            ],
            "questions": [
                {"fact": q.fact, "question": q.ending, "answer": q.answer} for q in self.asked
            ],
            "busy_cores": self.busy,
            "prefill": self.prefill,
            "decode": self.decode,
        }

    def tell(self, console: Console) -> None:
        """Print an answer, the figures, and what they mean."""
        self._tell_answer(console)
        counts = [self.right.count((a, b)) for a in (True, False) for b in (True, False)]
        answers = (
            f"\nOf {len(self.asked)} such questions both answered {counts[0]} rightly, only "
            f"{self.base.name} {counts[1]}, only {self.other.name} {counts[2]}, neither "
            f"{counts[3]}. So few can only show a large difference: `indexcache eval run` asks as "
            "many as it takes."
        )
        for told in (answers, self._table(), self._summary()):
            console.print(told, highlight=False)

    def _tell_answer(self, console: Console) -> None:
        """The first question that both answered rightly, or else the first of all."""
        number = self.right.index((True, True)) if (True, True) in self.right else 0
        question = self.asked[number]
        console.print(
            f"\n[bold]Question {number + 1} of {len(self.asked)}.[/bold] The model reads a piece "
            "of source code, which is cut by notes that have nothing to do with it:\n",
            highlight=False,
        )
        for line in question.place:
            mark, style = (">", "bold yellow") if line == question.fact else (" ", "dim")
            console.print(f"  {mark} {line}", style=style, markup=False, highlight=False)
        console.print(
            f'\nThe text ends with "{question.ending}", and the next word should be '
            f'"{question.answer.strip()}".',
            markup=False,
            highlight=False,
        )
        for one, is_right in zip(self.both, self.right[number], strict=True):
            console.print("  [green]✓[/green]" if is_right else "  [red]✗[/red]", end="")
            said = f' {one.name:>5} says "{one.said[number].strip()}"'
            console.print(said, markup=False, highlight=False)

    def _table(self) -> Table:
        title = f"\nPrompts of {self.prompt_tokens} tokens on this machine's CPU"
        table = Table(title=title, box=SIMPLE_HEAD)
        table.add_column("median and range")
        for one in self.both:
            table.add_column(one.name, justify="right")
        table.add_column("times faster")
        states = [one.state for one in self.both if one.state is not None]
        table.add_row("pattern", *(state.pattern for state in states))
        table.add_row("layers with indexer", *(str(state.full_layers) for state in states))
        table.add_row("layers that reuse", *(str(state.shared_layers) for state in states))
        per_token = (str(state.index_k_bytes_per_token) for state in states)
        table.add_row("index-K bytes/token", *per_token)
        prefills = (_spread(one.prefill, 1, ".2f") for one in self.both)
        table.add_row("prefill, s", *prefills, self.prefill)
        decodes = (_spread(one.per_token, 1000, ".1f") for one in self.both)
        table.add_row("decode, ms/token", *decodes, self.decode)
        return table

    def _summary(self) -> str:
        told = (
            f"How many times faster was {self.other.name} than {self.base.name}, over "
            f"{len(self.busy)} rounds in turns? Prefill: {self.prefill}. Decode: {self.decode}."
        )
        if (busiest := max((cores or 0.0 for cores in self.busy), default=0.0)) > QUIET_CORES:
            told += (
                f" Other programs kept up to {busiest:.1f} of {os.cpu_count()} cores busy, so "
                "try again when the machine is quiet."
            )
        return told + (
            " A small model on a CPU says nothing about a GPU's speed. Next: `indexcache server "
            "doctor` for your own checkpoint, `indexcache search run` for a pattern made for it, "
            "`indexcache bench latency` for times on your node."
        )


def _spread(values: Sequence[float], unit: float, form: str) -> str:
    each = [unit * value for value in values]
    return f"{median(each):{form}}\n{min(each):{form}} to {max(each):{form}}"
