"""Paired differences between two arms, clustered by context and stratified by cell.

Two arms are compared question by question: what makes a question hard is the same in both and
cancels. The questions behind one context fail together (one lost passage loses several answers),
so a context's mean difference is one observation, whatever happens inside it. Treating questions
as independent makes standard errors 2 to 3 times too small (Miller 2024, arXiv:2411.00640).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sglang_indexcache.errors import QualityError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Cell = tuple[str, int]
"""A stratum: a task at a length in tokens."""


@dataclass(frozen=True)
class Outcome:
    """One question as one arm answered it.

    Attributes:
        context: the prompt before the question; its name is unique in the evaluation.
        question: unique within the context.
        task: what is asked.
        length: of context and question, in tokens, as planned.
        arm: the reference, a pattern or a control.
        value: 1 right, 0 wrong; a probability or a score; or a loss in nats.
        repeat: 0, and 1 where the arm was asked again (A/A).
        right: whether it was right, of which flips are counted; None if the value says so.
    """

    context: str
    question: str
    task: str
    length: int
    arm: str
    value: float
    repeat: int = 0
    right: float | None = None

    @property
    def cell(self) -> Cell:
        """Its stratum."""
        return self.task, self.length


@dataclass(frozen=True)
class Flips:
    """Paired questions that differ between two arms.

    Attributes:
        lost: questions on which the second arm has less than the first.
        won: questions on which it has more.
        pairs: questions that both arms answered.
    """

    lost: int
    won: int
    pairs: int

    @property
    def share(self) -> float:
        """Of the pairs that differ, 0 to 1."""
        return (self.lost + self.won) / self.pairs if self.pairs else 0.0

    def __str__(self) -> str:
        return f"{self.lost:,} lost, {self.won:,} won of {self.pairs:,}"


@dataclass(frozen=True)
class Differences:
    """Arm minus reference, one mean a context, in the order in which contexts were asked.

    Attributes:
        values: float64 [contexts], mean over the context's paired questions; of right answers
            within -1 to 1. A study has leading dimensions: many evaluations of one design.
        cells: int64 [contexts], which of ``names`` a context belongs to.
        names: the cells.
        flips: over all pairs.
        questions: int64 [contexts], how many each value is the mean of.
        missing: questions that only one of the arms answered. They are left out of both.
        reference: float64 [contexts], means of the reference's values; empty if nobody asks.
    """

    values: Floats
    cells: Ints
    names: tuple[Cell, ...]
    flips: Flips
    questions: Ints
    missing: int = 0
    reference: Floats = field(default_factory=lambda: np.zeros(0))

    def __len__(self) -> int:
        return len(self.cells)

    def of(self, cell: int) -> Differences:
        """Those of one cell; their flips are not counted anew."""
        here = self.cells == cell
        return Differences(
            self.values[..., here],
            np.zeros(int(here.sum()), dtype=np.int64),
            (self.names[cell],),
            self.flips,
            self.questions[here],
        )


def paired(
    outcomes: Iterable[Outcome],
    arm: str,
    reference: str,
    *,
    cells: Iterable[Cell] | None = None,
    repeat: int = 0,
) -> Differences:
    """``arm`` minus the first answers of ``reference``, by context.

    Args:
        cells: leave out all others.
        repeat: of ``arm``; ``paired(outcomes, ref, ref, repeat=1)`` is the A/A comparison.

    Raises:
        QualityError: no pair at all.
    """
    kept = None if cells is None else set(cells)
    first: dict[tuple[str, str], Outcome] = {}
    second: dict[tuple[str, str], Outcome] = {}
    for row in outcomes:
        if kept is None or row.cell in kept:
            if (row.arm, row.repeat) == (reference, 0):
                first[row.context, row.question] = row
            if (row.arm, row.repeat) == (arm, repeat):
                second[row.context, row.question] = row
    groups: dict[str, list[tuple[Outcome, Outcome]]] = defaultdict(list)
    for key, one in first.items():
        if key in second:
            groups[key[0]].append((one, second[key]))
    if not groups:
        raise QualityError(
            f"{arm!r} and {reference!r} have no question in common; ask both the same contexts"
        )
    places = [pairs[0][0].cell for pairs in groups.values()]
    names = tuple(sorted(set(places)))
    changes = [_right(after) - _right(one) for pairs in groups.values() for one, after in pairs]
    return Differences(
        np.array([np.mean([b.value - a.value for a, b in pairs]) for pairs in groups.values()]),
        np.array([names.index(cell) for cell in places], dtype=np.int64),
        names,
        Flips(sum(one < 0 for one in changes), sum(one > 0 for one in changes), len(changes)),
        np.array([len(pairs) for pairs in groups.values()], dtype=np.int64),
        missing=len(first.keys() ^ second.keys()),
        reference=np.array([np.mean([a.value for a, _ in pairs]) for pairs in groups.values()]),
    )


def _right(row: Outcome) -> float:
    return row.value if row.right is None else row.right
