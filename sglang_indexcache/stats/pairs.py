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
        value: 1 right, 0 wrong; or a loss in nats.
        repeat: 0, and 1 where the arm was asked again (A/A).
    """

    context: str
    question: str
    task: str
    length: int
    arm: str
    value: float
    repeat: int = 0


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
        QualityError: a question twice in an arm, a context in two cells, or no pair at all.
    """
    kept = None if cells is None else set(cells)
    first: dict[tuple[str, str], float] = {}
    second: dict[tuple[str, str], float] = {}
    cell_of: dict[str, Cell] = {}
    for row in outcomes:
        cell = (row.task, row.length)
        if kept is not None and cell not in kept:
            continue
        sides = [
            side
            for side, wanted in ((first, (reference, 0)), (second, (arm, repeat)))
            if (row.arm, row.repeat) == wanted
        ]
        for side in sides:
            if cell_of.setdefault(row.context, cell) != cell:
                raise QualityError(
                    f"context {row.context!r} is in two cells, {cell_of[row.context]} and {cell}; "
                    "name each context once"
                )
            if (row.context, row.question) in side:
                raise QualityError(
                    f"question {row.question!r} of context {row.context!r} is there twice for "
                    f"{row.arm!r}; give a second asking of it another repeat"
                )
            side[row.context, row.question] = row.value
    return _by_context(first, second, cell_of, f"{arm!r} and {reference!r}")


def _by_context(
    first: dict[tuple[str, str], float],
    second: dict[tuple[str, str], float],
    cell_of: dict[str, Cell],
    arms: str,
) -> Differences:
    groups: dict[str, list[float]] = defaultdict(list)
    own: dict[str, list[float]] = defaultdict(list)
    for key, value in first.items():
        if key in second:
            groups[key[0]].append(second[key] - value)
            own[key[0]].append(value)
    if not groups:
        raise QualityError(f"{arms} have no question in common; ask both the same contexts")
    names = tuple(sorted({cell_of[context] for context in groups}))
    every = np.concatenate([np.asarray(group) for group in groups.values()])
    return Differences(
        np.array([np.mean(group) for group in groups.values()], dtype=np.float64),
        np.array([names.index(cell_of[context]) for context in groups], dtype=np.int64),
        names,
        Flips(int((every < 0).sum()), int((every > 0).sum()), len(every)),
        np.array([len(group) for group in groups.values()], dtype=np.int64),
        missing=len(first.keys() ^ second.keys()),
        reference=np.array([np.mean(group) for group in own.values()], dtype=np.float64),
    )
