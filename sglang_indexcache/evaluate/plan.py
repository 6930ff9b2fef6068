"""What will be asked, and in which order: fixed before the first request."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from sglang_indexcache.errors import QualityError
from sglang_indexcache.evaluate.tasks import CONTROL, TASKS
from sglang_indexcache.stats.pairs import Cell
from sglang_indexcache.stats.power import Design, spread_over_cells
from sglang_indexcache.support.lengths import counted

DISCORDANCE, CORRELATION = 0.02, 0.1
"""Assumed before anything is measured: paired questions that differ, and how they do together."""
PROBABILITY_DEVIATION = 0.05
"""Assumed of a context's difference in probability: 4.9 points were measured of a searched 1/4 on
the small checkpoint, 1.75 of 1/2. All contexts differ."""
LEAST_CONTEXTS = 32
"""Of each task and length, if the user does not say how many."""
AGAIN_EVERY = 4
"""The reference is asked twice (A/A) on every 4th context of a cell."""
CONTROL_SHARE = 0.75
"""Of ``index_topk``: the length of the contexts in which every pattern selects everything."""
CONTROL_CONTEXTS = 2
"""Of each task."""
PAGE = 64
"""Tokens of a cache page: what is left of a context's last one is computed for each question."""
SHORTEST, LEFT_FREE = 32 * 1024, 1024
"""Tokens: the first length where none is given, and what of a model's context stays free."""
CONTROL_LOOK = 0
"""Of contexts of at most ``index_topk`` tokens: they are asked before the first look."""
ENDPOINTS = {"answers": "right", "probability": "probability"}
"""What can be compared, chosen before the first request, and the value of an answer it stands for.

``answers``: right or wrong, as greedy decoding has it. ``probability``: with which the model says
the right answer at temperature 1; finer, so it needs fewer contexts, but another question.
"""


@dataclass(frozen=True)
class Planned:
    """A context of the plan; they are in the order of asking.

    Attributes:
        context: its name, unique.
        task: what is asked behind it.
        length: tokens of context, question and answer.
        look: at which planned look it first counts, from 1; ``CONTROL_LOOK`` for the control.
        again: whether the reference is asked twice (A/A).
    """

    context: str
    task: str
    length: int
    look: int
    again: bool


def default_lengths(context: int | None) -> tuple[int, ...]:
    """Lengths to ask where none is given: from 32Ki, doubled, up to the model's context.

    The last is that context to two digits: 200,000 for 202,752. What stays free is an eighth of a
    small one.

    Args:
        context: tokens that the model takes; None if its config does not say, then to 128Ki.
    """
    room = 4 * SHORTEST if context is None else context - min(LEFT_FREE, context // 8)
    found = [SHORTEST << n for n in range(32) if SHORTEST << n <= room]
    step: int = 10 ** max(len(str(room)) - 2, 0)
    last = room // step * step
    return (*found, last) if not found or last > found[-1] else tuple(found)


def assumed_spread(cells: Sequence[tuple[int, int]], endpoint: str) -> tuple[float, float, float]:
    """Spread of a context's difference before anything is measured, as `Design` takes it.

    Args:
        cells: contexts of each, and questions behind one of its contexts.
        endpoint: see :data:`ENDPOINTS`.
    """
    if endpoint == "answers":
        return spread_over_cells(cells, DISCORDANCE, CORRELATION)
    total = sum(count for count, _ in cells)
    weights = [total / (len(cells) * count) for count, _ in cells]
    squares = (count / total * one**2 for (count, _), one in zip(cells, weights, strict=True))
    return PROBABILITY_DEVIATION * math.sqrt(sum(squares)), 1.0, max(weights)


def enough_contexts(
    cells: int, questions: int, margin: float, looks: int, endpoint: str = "answers"
) -> int:
    """Contexts of each cell with which a plan can show its margin, under what is assumed here.

    Args:
        cells: tasks times lengths.
        questions: behind one context.
        margin: 0.01 is one point.
        looks: the number is a multiple of them.
        endpoint: see :data:`ENDPOINTS`.

    Returns:
        At least :data:`LEAST_CONTEXTS`, so that each cell can see a control lose.
    """
    needed = Design(looks, margin, looks).needed(
        *assumed_spread([(1, questions)] * cells, endpoint)
    )
    return looks * math.ceil(max(LEAST_CONTEXTS, needed / cells) / looks)


@dataclass(frozen=True)
class SelectedRows:
    """The rows of a user's file that make a cell.

    Attributes:
        task: of the file.
        length: tokens that hold each of them with its answer, and the next smaller length does not.
        rows: their numbers, in the order of asking.
        sizes: tokens of each, with its answer.
        available: rows of the file that belong to this cell.
    """

    task: str
    length: int
    rows: tuple[int, ...]
    sizes: tuple[int, ...]
    available: int


@dataclass(frozen=True)
class EvaluationPlan:
    """What will be asked.

    Attributes:
        tasks: names of generated tasks; may be empty if there are files.
        lengths: tokens of a context with its longest question and that one's answer.
        contexts: of each task at each length.
        questions: behind one context.
        selects_all: ``index_topk``.
        margin: see :class:`~sglang_indexcache.stats.power.Design`.
        looks: likewise.
        seed: of the first context of each cell; the others count from there.
        taken: rows of a user's files.
        endpoint: see :data:`ENDPOINTS`.

    Raises:
        QualityError: what cannot be asked, or could show nothing.
    """

    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    contexts: int
    questions: int
    selects_all: int
    margin: float = 0.01
    looks: int = 4
    seed: int = 0
    taken: tuple[SelectedRows, ...] = ()
    endpoint: str = "answers"

    def __post_init__(self) -> None:
        if self.endpoint not in ENDPOINTS:
            raise QualityError(f"no endpoint is called {self.endpoint!r}: {' or '.join(ENDPOINTS)}")
        for task in self.tasks:
            if task not in TASKS:
                raise QualityError(
                    f"no task is called {task!r}; there are {', '.join(TASKS)}. Run other "
                    "benchmarks with their own harness for each arm, and give both logs to "
                    "`indexcache eval compare`."
                )
        if len(set(self.tasks)) < len(self.tasks):
            raise QualityError("give each task once")
        short = [length for length in self.lengths if length <= self.selects_all]
        if short or not self.lengths:
            raise QualityError(
                f"a context of {', '.join(map(str, short)) or 'no'} tokens can show nothing: up to "
                f"{self.selects_all} tokens (index_topk) this model's queries select everything, "
                f"whatever is shared. Take longer ones (--length), such as "
                f"{8 * self.selects_all}; the control below is asked by itself."
            )
        if self.questions < 1:
            raise QualityError(f"{self.questions} questions behind a context; ask one at least")
        if self.contexts < self.looks:
            raise QualityError(
                f"{counted(self.contexts, 'context')} of each task and length cannot be looked at "
                f"{self.looks} times; give more (--contexts) or look less often (--looks)"
            )
        Design(self.contexts, self.margin, self.looks)  # refuses what no design can have

    @property
    def design(self) -> Design:
        """Of all cells together."""
        contexts = sum(map(len, self.cells.values()))
        return Design(contexts, margin=self.margin, looks=self.looks)

    @property
    def assumed(self) -> tuple[float, float, float]:
        """Spread of a context's difference before anything is measured, as ``design`` takes it."""
        asked = [(len(rows), self.questions_of(task)) for (task, _), rows in self.cells.items()]
        return assumed_spread(asked, self.endpoint)

    @cached_property
    def cells(self) -> dict[Cell, Sequence[int]]:
        """Numbers of their contexts in the order of asking: seeds, or rows of a file."""
        seeds = range(self.seed, self.seed + self.contexts)
        found: dict[Cell, Sequence[int]] = {
            (task, length): seeds for length in self.lengths for task in self.tasks
        }
        found |= {(cell.task, cell.length): cell.rows for cell in self.taken}
        return dict(sorted(found.items(), key=lambda one: -one[0][1]))

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Tokens of a file's contexts, by name; all others have their cell's length."""
        return {
            context_name(cell.task, cell.length, row): size
            for cell in self.taken
            for row, size in zip(cell.rows, cell.sizes, strict=True)
        }

    @property
    def longest(self) -> int:
        """Tokens of the longest context with its question and answer."""
        return max(self.sizes.values(), default=0) if not self.tasks else max(self.lengths)

    def questions_of(self, task: str) -> int:
        """Behind one of its contexts; one behind a file's."""
        return self.questions if task in self.tasks else 1

    @property
    def control_length(self) -> int:
        """Tokens of the control's contexts."""
        return int(CONTROL_SHARE * self.selects_all)

    @cached_property
    def planned(self) -> tuple[Planned, ...]:
        """Every context, in the order of asking: the control, then round by round over the cells.

        So each look has the same share of every cell, and whatever drifts hits all cells alike. The
        longest come first: their rate, the slowest, says how long everything takes at most.
        """
        control = [
            Planned(context_name(task, self.control_length, n), task, self.control_length, 0, False)
            for n in range(CONTROL_CONTEXTS)
            for task in self.tasks or (CONTROL,)
        ]
        rounds = [
            (
                n / len(rows),
                Planned(
                    context_name(task, length, row),
                    task,
                    length,
                    n * self.looks // len(rows) + 1,
                    n % AGAIN_EVERY == 0,
                ),
            )
            for (task, length), rows in self.cells.items()
            for n, row in enumerate(rows)
        ]
        rounds.sort(key=lambda one: one[0])  # cells stay in their order
        return (*control, *(planned for _, planned in rounds))


def context_name(task: str, length: int, seed: int) -> str:
    """Unique in a plan; it ends in the seed, or the number of a file's row."""
    return f"{task}-{length}-{seed}"
