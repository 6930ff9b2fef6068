"""Paired differences between two arms, clustered by context and stratified by cell.

Two arms are compared question by question: what makes a question hard is the same in both and
cancels. The questions behind one context fail together (one lost passage loses several answers),
so a context's mean difference is one observation, whatever happens inside it. Treating questions
as independent makes standard errors 2 to 3 times too small (Miller 2024, arXiv:2411.00640).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
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
    """One arm's answer to one question.

    Attributes:
        context: the prompt before the question; its name is unique in the evaluation.
        question: unique within the context.
        length: planned length of context and question, in tokens.
        value: 1 if right, 0 if wrong; or a score from 0 to 1.
        repeat: 0, or 1 if the arm was asked again (A/A).
    """

    context: str
    question: str
    task: str
    length: int
    arm: str
    value: float
    repeat: int = 0

    @property
    def cell(self) -> Cell:
        """Stratum of this outcome."""
        return self.task, self.length


@dataclass(frozen=True)
class Flips:
    """Numbers of questions among ``pairs`` that the second arm lost and won against the first."""

    lost: int
    won: int
    pairs: int

    def __str__(self) -> str:
        return f"{self.lost:,} lost, {self.won:,} won of {self.pairs:,}"


@dataclass(frozen=True)
class Differences:
    """Differences arm minus reference, one mean per context, in the order of asking.

    Attributes:
        values: float64 [contexts], mean over the context's paired questions; within -1 to 1 for
            right answers. A study has leading dimensions: many evaluations of one design.
        cells: int64 [contexts], index in ``names`` of each context's cell.
        questions: int64 [contexts], number of questions in each mean.
        reference: float64 [contexts], means of the reference's values; empty if they are not
            needed.
    """

    values: Floats
    cells: Ints
    names: tuple[Cell, ...]
    flips: Flips
    questions: Ints
    reference: Floats = field(default_factory=lambda: np.zeros(0))

    def __len__(self) -> int:
        return len(self.cells)

    def of(self, cell: int) -> Differences:
        """Return the differences in one cell; the flips are not counted again."""
        in_cell = self.cells == cell
        return Differences(
            self.values[..., in_cell],
            np.zeros(int(in_cell.sum()), dtype=np.int64),
            (self.names[cell],),
            self.flips,
            self.questions[in_cell],
        )


def paired(
    outcomes: Iterable[Outcome],
    arm: str,
    reference: str,
    *,
    cells: Iterable[Cell] | None = None,
    repeat: int = 0,
) -> Differences:
    """Return ``arm`` minus the first answers of ``reference``, by context.

    Args:
        cells: the cells to use; None uses all.
        repeat: the repeat of ``arm``; ``paired(outcomes, ref, ref, repeat=1)`` is the A/A
            comparison.

    Raises:
        QualityError: there is no pair at all.
    """
    selected = None if cells is None else set(cells)
    rows = [row for row in outcomes if selected is None or row.cell in selected]
    groups = _pairs_by_context(_answers(rows, reference, 0), _answers(rows, arm, repeat))
    if not groups:
        raise QualityError(
            f"{arm!r} and {reference!r} have no question in common; ask both the same contexts"
        )
    places = [pairs[0][0].cell for pairs in groups.values()]
    names = tuple(sorted(set(places)))
    changes = [after.value - before.value for pairs in groups.values() for before, after in pairs]
    return Differences(
        np.array([np.mean([b.value - a.value for a, b in pairs]) for pairs in groups.values()]),
        np.array([names.index(cell) for cell in places], dtype=np.int64),
        names,
        Flips(sum(c < 0 for c in changes), sum(c > 0 for c in changes), len(changes)),
        np.array([len(pairs) for pairs in groups.values()], dtype=np.int64),
        reference=np.array([np.mean([a.value for a, _ in pairs]) for pairs in groups.values()]),
    )


def _answers(rows: Iterable[Outcome], arm: str, repeat: int) -> dict[tuple[str, str], Outcome]:
    """Return an arm's answers by context and question."""
    chosen = (row for row in rows if (row.arm, row.repeat) == (arm, repeat))
    return {(row.context, row.question): row for row in chosen}


def _pairs_by_context(
    first: Mapping[tuple[str, str], Outcome], second: Mapping[tuple[str, str], Outcome]
) -> dict[str, list[tuple[Outcome, Outcome]]]:
    """Return pairs of answers to the same questions, by context."""
    groups: dict[str, list[tuple[Outcome, Outcome]]] = defaultdict(list)
    for key, before in first.items():
        if key in second:
            groups[key[0]].append((before, second[key]))
    return groups
