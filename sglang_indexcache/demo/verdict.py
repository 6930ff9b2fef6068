"""What measurements in turns show, and what they do not: the rule behind every figure of the demo.

A figure is printed only if its own spread supports it. The rule is one of ranges, because a few
rounds on a machine that does other things as well give no normal distribution to reckon with.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

MIN_ROUNDS = 6
"""Servers of equal speed give six ratios on one side of 1 in 1 of 32 demos; three, in 1 of 4."""
WIDEST = 1.5
"""Highest ratio over lowest, beyond which only their range is told."""
CHANCE = 0.05
"""How rarely chance alone may give what is called a difference in answers."""

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
class Speedup:
    """How many times faster one server was than another, from measurements in turns.

    Attributes:
        ratios: of the two times of each round.
        rounds: how many.
    """

    ratios: Spread
    rounds: int

    @classmethod
    def of(cls, base: Sequence[float], other: Sequence[float]) -> Speedup:
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
        """How often servers that are equally good would differ at least so one-sidedly.

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
