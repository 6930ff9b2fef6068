"""What the demo saw, what that shows, and how it is told.

A figure is printed only if its own spread supports it. The rule is one of ranges, because a few
rounds on a machine that does other things as well give no normal distribution to reckon with.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
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
CHANCE = 0.05
"""How rarely chance alone may give what is called a difference in answers."""
QUIET_CORES = 0.3
"""Cores' worth of foreign work that a measurement hardly feels."""
UNSHOWN = "no difference shown"


@dataclass(frozen=True)
class Spread:
    """The median of some values, the lowest and the highest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class DemoSpeedup:
    """How many times faster one server was than another: the ratios of so many rounds."""

    ratios: Spread
    rounds: int

    @classmethod
    def of(cls, base: Sequence[float], other: Sequence[float]) -> DemoSpeedup:
        """From the seconds of each round, all above zero; both servers in the same order."""
        ratios = [slow / fast for slow, fast in zip(base, other, strict=True)]
        return cls(Spread.of(ratios), len(ratios))

    @property
    def is_shown(self) -> bool:
        """Whether there were enough rounds and every one of them says who is faster."""
        one_side = self.ratios.low > 1 or self.ratios.high < 1
        return one_side and self.rounds >= MIN_ROUNDS

    @property
    def is_steady(self) -> bool:
        """Whether the rounds agree well enough for one number."""
        return self.ratios.high <= WIDEST * self.ratios.low

    def __str__(self) -> str:
        """The median if the rounds support one, else their range or that nothing was shown."""
        low, high = f"{self.ratios.low:.2f}x", f"{self.ratios.high:.2f}x"
        if not self.is_shown:
            return f"{UNSHOWN} ({low} to {high})"
        if not self.is_steady:
            return f"{low} to {high}, too unsteady for one number"
        return f"{self.ratios.median:.2f}x ({low} to {high})"


@dataclass(frozen=True)
class PairedAnswers:
    """How often two servers were right about the same questions."""

    both: int
    only_base: int
    only_other: int
    neither: int

    @classmethod
    def of(cls, base: Sequence[bool], other: Sequence[bool]) -> PairedAnswers:
        """From whether each was right, question by question."""
        pairs = list(zip(base, other, strict=True))
        kinds = ((True, True), (True, False), (False, True), (False, False))
        return cls(*(pairs.count(kind) for kind in kinds))

    @property
    def chance(self) -> float:
        """How often equally good servers would differ at least so one-sidedly.

        The exact two-sided sign test over the questions that only one answered rightly
        (McNemar's).
        """
        fewer, differ = min(self.only_base, self.only_other), self.only_base + self.only_other
        tail = sum(math.comb(differ, count) for count in range(fewer + 1))
        return min(1.0, 2 * tail * 0.5**differ)

    @property
    def is_shown(self) -> bool:
        """Whether chance alone is an unlikely reason for the difference."""
        return self.chance < CHANCE


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

    def is_right(self, asked: Sequence[DemoQuestion]) -> list[bool]:
        """Question by question."""
        return [said == question.answer for said, question in zip(self.said, asked, strict=True)]


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
        self.prefill = DemoSpeedup.of(base.prefill, other.prefill)
        self.decode = DemoSpeedup.of(base.per_token, other.per_token)
        self.answers = PairedAnswers.of(base.is_right(self.asked), other.is_right(self.asked))

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
            "prefill": str(self.prefill),
            "decode": str(self.decode),
            "answers": asdict(self.answers) | {"chance": self.answers.chance},
        }

    def tell(self, console: Console) -> None:
        """Print an answer, the figures, and what they mean."""
        self._tell_answer(console)
        for told in (self._answers_in_words(), self._table(), self._summary()):
            console.print(told, highlight=False)

    def _tell_answer(self, console: Console) -> None:
        """The first question that both answered rightly, or else the first of all."""
        pairs = list(zip(*(one.is_right(self.asked) for one in self.both), strict=True))
        number = pairs.index((True, True)) if (True, True) in pairs else 0
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
        for one, is_right in zip(self.both, pairs[number], strict=True):
            console.print("  [green]✓[/green]" if is_right else "  [red]✗[/red]", end="")
            said = f' {one.name:>5} says "{one.said[number].strip()}"'
            console.print(said, markup=False, highlight=False)

    def _answers_in_words(self) -> str:
        answers, count = self.answers, len(self.asked)
        told = (
            f"\nOf {count} such questions both answered {answers.both} rightly, only "
            f"{self.base.name} {answers.only_base}, only {self.other.name} {answers.only_other}, "
            f"neither {answers.neither}. "
        )
        if answers.only_base == answers.only_other == 0:
            return told + "They never differ, which so few questions cannot turn into a proof."
        chance = (
            f"If both were equally good, chance would favour one so much in {answers.chance:.1%} "
        )
        if answers.is_shown:
            return told + chance + "of such demos only: this difference is probably real."
        rest = f"of such demos: {UNSHOWN}, and {count} questions can only show a large one."
        return told + chance + rest

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
        table.add_row("prefill, s", *prefills, str(self.prefill))
        decodes = (_spread(one.per_token, 1000, ".1f") for one in self.both)
        table.add_row("decode, ms/token", *decodes, str(self.decode))
        return table

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
