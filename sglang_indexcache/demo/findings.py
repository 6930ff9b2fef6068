"""What the demo tells: before it starts, and of what it saw."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from sglang_indexcache.client import Client
from sglang_indexcache.demo.material import Question
from sglang_indexcache.demo.verdict import UNSHOWN, PairedAnswers, Speedup, Spread

QUIET_CORES = 0.3
"""Cores' worth of foreign work that a measurement hardly feels."""


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
    state: dict[str, Any] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """Every sample, for a file."""
        return {name: value for name, value in vars(self).items() if name != "client"}


@dataclass
class Findings:
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
    asked: Sequence[Question]
    prompt_tokens: int
    busy: list[float | None]

    @property
    def prefill(self) -> Speedup:
        """Of the first token."""
        return Speedup.of(self.base.prefill, self.other.prefill)

    @property
    def decode(self) -> Speedup:
        """Of each token after the first."""
        return Speedup.of(self.base.per_token, self.other.per_token)

    @property
    def answers(self) -> PairedAnswers:
        """Which questions were answered rightly."""
        return PairedAnswers.of(self._right(self.base), self._right(self.other))

    def record(self) -> dict[str, Any]:
        """Every sample, for a file."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "servers": [one.record() for one in (self.base, self.other)],
            "questions": [
                {"fact": q.fact, "question": q.ending, "answer": q.answer} for q in self.asked
            ],
            "busy_cores": self.busy,
            "prefill": str(self.prefill),
            "decode": str(self.decode),
            "answers": asdict(self.answers) | {"chance": self.answers.chance},
        }

    def tell(self, console: Console) -> None:
        """Print an answer, the figures, and what they mean."""
        self._tell_answer(console)
        console.print(self._answers_in_words(), highlight=False)
        console.print(self._table())
        console.print(self._summary(), highlight=False)

    def _right(self, one: Contender) -> list[bool]:
        return [said == q.answer for said, q in zip(one.said, self.asked, strict=True)]

    def _tell_answer(self, console: Console) -> None:
        """The first question that both answered rightly, or else the first of all."""
        pairs = zip(self._right(self.base), self._right(self.other), strict=True)
        shown = next((number for number, pair in enumerate(pairs) if all(pair)), 0)
        question = self.asked[shown]
        console.print(
            f"\n[bold]Question {shown + 1} of {len(self.asked)}.[/bold] The model reads a piece of "
            "source code, which is cut by notes that have nothing to do with it:\n",
            highlight=False,
        )
        for line in question.place:
            style = "bold yellow" if line == question.fact else "dim"
            mark = ">" if line == question.fact else " "
            console.print(f"  {mark} {line}", style=style, markup=False, highlight=False)
        console.print(
            f'\nThe text ends with "{question.ending}", and the next word should be '
            f'"{question.answer.strip()}".',
            markup=False,
            highlight=False,
        )
        for one in (self.base, self.other):
            tick = "[green]✓[/green]" if one.said[shown] == question.answer else "[red]✗[/red]"
            console.print(f"  {tick} {one.name:>5} says ", end="")
            console.print(f'"{one.said[shown].strip()}"', markup=False, highlight=False)

    def _answers_in_words(self) -> str:
        answers, count = self.answers, len(self.asked)
        differ = answers.only_base + answers.only_other
        told = (
            f"\nOf {count} such questions, {self.base.name} answered "
            f"{answers.both + answers.only_base} rightly and {self.other.name} "
            f"{answers.both + answers.only_other}: both were right on {answers.both}, only "
            f"{self.base.name} on {answers.only_base}, only {self.other.name} on "
            f"{answers.only_other}, neither on {answers.neither}. "
        )
        if not differ:
            return told + "They never differ, which so few questions cannot turn into a proof."
        told += (
            f"If both were equally good, chance would favour one so much in {answers.chance:.1%} "
        )
        if answers.is_shown:
            return told + "of such demos only: this difference is probably real."
        return told + f"of such demos: {UNSHOWN}, and {count} questions can only show a large one."

    def _table(self) -> Table:
        title = f"\nPrompts of {self.prompt_tokens} tokens on this machine's CPU"
        table = Table(title=title, box=SIMPLE_HEAD)
        table.add_column("median and range")
        for one in (self.base, self.other):
            table.add_column(one.name, justify="right")
        table.add_column("times faster")
        table.add_row("pattern", *self._states("pattern"))
        table.add_row("layers with indexer", *self._states("full_layers"))
        table.add_row("layers that reuse", *self._states("shared_layers"))
        table.add_row("index-K bytes/token", *self._states("index_k_bytes_per_token"))
        table.add_row(
            "prefill, s",
            *(_spread(one.prefill, 1, ".2f") for one in (self.base, self.other)),
            str(self.prefill),
        )
        table.add_row(
            "decode, ms/token",
            *(_spread(one.per_token, 1000, ".1f") for one in (self.base, self.other)),
            str(self.decode),
        )
        return table

    def _states(self, key: str) -> tuple[str, str]:
        return str(self.base.state[key]), str(self.other.state[key])

    def _summary(self) -> str:
        known = [cores for cores in self.busy if cores is not None]
        told = (
            f"How many times faster was {self.other.name} than {self.base.name}, over "
            f"{self.prefill.rounds} rounds in turns? Prefill: {self.prefill}. "
            f"Decode: {self.decode}."
        )
        if known and max(known) > QUIET_CORES:
            told += (
                f" Other programs kept up to {max(known):.1f} of {os.cpu_count()} cores busy, so "
                "try again when the machine is quiet."
            )
        return told + (
            " A small model on a CPU says nothing about a GPU's speed. Next: `indexcache server "
            "doctor` for your own checkpoint, `indexcache search run` for a pattern made for it, "
            "`indexcache bench latency` for times on your node."
        )


def _spread(values: Sequence[float], unit: float, form: str) -> str:
    spread = Spread.of([unit * value for value in values])
    return f"{spread.median:{form}}\n{spread.low:{form}} to {spread.high:{form}}"
