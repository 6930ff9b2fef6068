"""Paired differences between two arms, clustered by context and stratified by cell.

Two arms are compared question by question: what makes a question hard is the same in both and
cancels. The questions behind one context fail together (one lost passage loses several answers),
so a context's mean difference is one observation, whatever happens inside it. Treating questions
as independent makes standard errors 2 to 3 times too small (Miller 2024, arXiv:2411.00640).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from sglang_indexcache.errors import QualityError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Cell = tuple[str, int]
"""A stratum: a task at a length in tokens."""


@dataclass(frozen=True)
class Answer:
    """One arm's answer to one question, as measured and as kept in an evaluation's journal.

    Attributes:
        repeat: 0, or 1 if the arm was asked again (A/A).
        context: the prompt before the question; its name is unique in the evaluation.
        question: unique within the context.
        length: planned length of context and question, in tokens.
        depth: place in the context, 0 to 1, of the first line from which the answer follows; None
            if a file or log does not tell.
        right: 1 if the whole answer is right, else 0; for answers that a judge would read, the
            share of right tokens; for another harness, its score, 0 to 1.
        tokens: number of tokens in the right answer.
        logprobs: log-probabilities of these tokens, in nats; empty for a log's answer.
        trace: sum of all returned log-probabilities; two patterns have the same sum only if they
            compute the same.
    """

    arm: str
    repeat: int
    context: str
    question: str
    task: str
    length: int
    depth: float | None
    right: float
    tokens: int = 0
    logprobs: tuple[float, ...] = ()
    trace: float | None = None

    @property
    def cell(self) -> Cell:
        """Stratum of this answer."""
        return self.task, self.length

    @property
    def probability(self) -> float | None:
        """Probability of the right answer, 0 to 1; None for a log's answer."""
        return math.exp(sum(self.logprobs)) if self.logprobs else None


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
    answers: Iterable[Answer],
    arm: str,
    reference: str,
    *,
    cells: Iterable[Cell] | None = None,
    repeat: int = 0,
    of: Literal["right", "probability"] = "right",
) -> Differences:
    """Return ``arm`` minus the first answers of ``reference``, by context.

    Args:
        cells: the cells to use; None uses all.
        repeat: the repeat of ``arm``; ``paired(answers, ref, ref, repeat=1)`` is the A/A
            comparison.
        of: the value to compare; every answer must have it.

    Raises:
        QualityError: there is no pair at all.
    """
    selected = None if cells is None else set(cells)
    rows = [row for row in answers if selected is None or row.cell in selected]
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    places: dict[str, Cell] = {}
    after = {(r.context, r.question): r for r in rows if (r.arm, r.repeat) == (arm, repeat)}
    for row in rows:
        partner = after.get((row.context, row.question))
        if partner is not None and (row.arm, row.repeat) == (reference, 0):
            groups[row.context].append((getattr(row, of), getattr(partner, of)))
            places[row.context] = row.cell
    if not groups:
        raise QualityError(
            f"{arm!r} and {reference!r} have no question in common; ask both the same contexts"
        )
    names = tuple(sorted(set(places.values())))
    pairs = [np.array(values, dtype=np.float64).T for values in groups.values()]
    changes = np.concatenate([new - old for old, new in pairs])
    return Differences(
        np.array([(new - old).mean() for old, new in pairs]),
        np.array([names.index(cell) for cell in places.values()], dtype=np.int64),
        names,
        Flips(int((changes < 0).sum()), int((changes > 0).sum()), len(changes)),
        np.array([len(old) for old, _ in pairs], dtype=np.int64),
        reference=np.array([old.mean() for old, _ in pairs]),
    )
