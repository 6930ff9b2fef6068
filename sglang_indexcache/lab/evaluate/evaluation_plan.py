"""Plan of the questions, the patterns and their order, fixed before the first request."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from sglang_indexcache.checkpoint import Checkpoint, read_config, text_config
from sglang_indexcache.errors import PatternError, QualityError
from sglang_indexcache.lab.evaluate.tasks import CONTROL, TASKS
from sglang_indexcache.lab.stats.design import Design, spread_over_cells
from sglang_indexcache.lab.stats.pairs import Cell
from sglang_indexcache.library.lengths import counted, format_length, points
from sglang_indexcache.library.resolve import Library, name_and_pattern
from sglang_indexcache.pattern import Pattern

CONTROLS = ("uniform:1/4", "uniform:1/8")
"""Positive controls, if the user gives none: the first that is no candidate. They lose a little.

A control that breaks everything would be seen to lose by a task that no real loss shows in.
"""
LAST_CONTROL = "first-layer-only"
"""Control if none of these is left or allowed: F, then S."""
DISCORDANCE, CORRELATION = 0.02, 0.1
"""Assumed share of paired questions that differ, and its correlation within a context."""
LEAST_CONTEXTS = 32
"""Contexts of each task and length, if the user does not say how many."""
SEEING = 0.85
"""Share of cells that detect a control with the paper's loss; the other cells leave the claim. From
`benchmarks/results/quality/gates.json`, for the number of contexts that is planned with it. """
WIDEST = 0.1
"""Margin above which a claim is empty, whatever the reference gets right."""
AGAIN_EVERY = 4
"""The reference is asked twice (A/A) on every 4th context of a cell, and on every control
context."""
CONTROL_SHARE = 0.75
"""Length of the control's contexts, as a share of ``index_topk``."""
CONTROL_CONTEXTS = 2
"""Contexts of the control for each task of the plan."""
SHORTEST, LEFT_FREE = 32 * 1024, 1024
"""First default length, and the part of a model's context that stays free, both in tokens."""
CONTROL_LOOK = 0
"""Look number of the control's contexts, which are asked before the first look."""


class Role(enum.Enum):
    """Purpose of an arm."""

    REFERENCE = "reference"
    CANDIDATE = "candidate"
    BAD = "bad"
    """The positive control, which is known to lose quality and must be seen to lose."""


@dataclass(frozen=True)
class Arm:
    """Side of a comparison: its unique name as written, and its F/S string (empty for a log).

    The repetition (A/A) is not an arm, but the reference with ``Answer.repeat`` 1.
    """

    name: str
    pattern: str
    role: Role


def arms_of(model: Path, against: str, patterns: Sequence[str], control: str) -> tuple[Arm, ...]:
    """Make the reference, the candidates from most to fewest F layers, and the positive control.

    Patterns are in any form, with or without ``NAME=`` before them. The default control is the
    first of :data:`CONTROLS` that this checkpoint can serve and that is no other arm, else
    :data:`LAST_CONTROL`.

    Raises:
        QualityError: two arms are the same pattern, or have the same name.
        PatternError, LibraryError: a pattern is malformed, unknown, or not for this checkpoint.
    """
    checkpoint, library = Checkpoint.read(model), Library.default()

    def make_arm(value: str, role: Role) -> Arm:
        name, written = name_and_pattern(value)
        pattern = library.resolve(written, checkpoint).pattern
        return Arm(name, str(pattern), role)

    candidates = [make_arm(value, Role.CANDIDATE) for value in patterns]
    candidates.sort(key=lambda arm: -len(Pattern(arm.pattern).full_layers))
    arms = [make_arm(against, Role.REFERENCE), *candidates]
    if control:
        arms.append(make_arm(control, Role.BAD))
    else:
        controls = []
        for value in CONTROLS:
            with suppress(PatternError):  # this checkpoint has no such indexers
                controls.append(make_arm(value, Role.BAD))
        first = str(Pattern("F" + "S" * (checkpoint.num_layers - 1)))
        controls.append(Arm(LAST_CONTROL, first, Role.BAD))
        used = {arm.pattern for arm in arms}
        unused = [arm for arm in controls if arm.pattern not in used]
        arms.append((unused or controls)[0])
    for place, arm in enumerate(arms):
        for earlier in arms[:place]:
            if arm.pattern == earlier.pattern:
                raise QualityError(
                    f"{arm.name} and {earlier.name} are the same pattern, {arm.pattern}; an arm "
                    "compared with itself says nothing. Give another (--against, --control)."
                )
            if arm.name == earlier.name:
                raise QualityError(f"two patterns are called {arm.name}; give each once")
    return tuple(arms)


def longest_context(model: Path) -> int | None:
    """Return the longest context of a checkpoint's model in tokens; None if it is not known."""
    longest = text_config(read_config(model)).get("max_position_embeddings")
    return None if longest is None else int(longest)


def default_lengths(context: int | None) -> tuple[int, ...]:
    """Return the default lengths: 32Ki, doubled up to the model's context.

    The last length is the model's context, rounded down to two digits: 200,000 for 202,752. 1,024
    tokens of the context stay free, or an eighth of a context below 8Ki. If the config names no
    context, the lengths end at 128Ki.
    """
    room = 4 * SHORTEST if context is None else context - min(LEFT_FREE, context // 8)
    lengths = [SHORTEST << n for n in range(32) if SHORTEST << n <= room]
    step: int = 10 ** max(len(str(room)) - 2, 0)
    last = room // step * step
    return (*lengths, last) if not lengths or last > lengths[-1] else tuple(lengths)


def assumed_spread(cells: Sequence[tuple[int, int]]) -> tuple[float, float, float]:
    """Return the assumed spread of a context, as arguments for ``Design.needed``.

    ``cells`` has each cell's number of contexts and of questions per context.
    """
    return spread_over_cells(cells, DISCORDANCE, CORRELATION)


def enough_contexts(cells: int, questions: int, margin: float, looks: int) -> int:
    """Return the contexts per cell with which a plan can show its margin, under our assumptions.

    The number is a multiple of the looks, and at least :data:`LEAST_CONTEXTS`. Cells that do not
    see the control lose leave the claim; the cells that stay, the share :data:`SEEING`, still have
    as many contexts as the claim needs.
    """
    assumed = assumed_spread([(1, questions)] * cells)
    needed = Design(looks, margin, looks).needed(*assumed) / SEEING
    return looks * math.ceil(max(LEAST_CONTEXTS, needed / cells) / looks)


@dataclass(frozen=True)
class Planned:
    """A context of the plan.

    Attributes:
        context: its name, unique.
        length: number of tokens of context, question and answer.
        look: the planned look at which it first counts, from 1; ``CONTROL_LOOK`` for the control.
        again: whether the reference is asked twice (A/A).
    """

    context: str
    task: str
    length: int
    look: int
    again: bool


@dataclass(frozen=True)
class SelectedRows:
    """Rows of a user's file that form a cell.

    Attributes:
        length: smallest planned length in tokens that holds each row with its answer.
        rows: number of the first row about each text, in the order of asking.
        sizes: number of tokens to compute for each text, with questions and answers.
        available: number of texts in the file that belong to this cell.
        questions: number of questions about each text.
        longest: number of tokens in the longest row, with its answer.
    """

    task: str
    length: int
    rows: tuple[int, ...]
    sizes: tuple[int, ...]
    available: int
    questions: tuple[int, ...]
    longest: int


@dataclass(frozen=True)
class EvaluationPlan:
    """Plan of an evaluation.

    Attributes:
        tasks: names of generated tasks; may be empty if there are files.
        lengths: number of tokens of a context with its longest question and that question's answer.
        contexts: number of contexts of each task at each length; each has ``questions`` questions.
        selects_all: ``index_topk``.
        margin: loss that still counts as none, as a share of right answers.
        looks: number of looks at which the evaluation may end, including the last.
        taken: rows of the user's files, which form cells like the generated tasks.
        seed: seed of the first context in each cell; the others count up from it.

    Raises:
        QualityError: the plan cannot be asked, or could show nothing.
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

    def __post_init__(self) -> None:
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
        if self.contexts < self.looks:
            raise QualityError(
                f"{counted(self.contexts, 'context')} of each task and length cannot be looked at "
                f"{self.looks} times; give more (--contexts) or look less often (--looks)"
            )
        Design(self.contexts, self.margin, self.looks)  # refuses numbers that no design can have

    @property
    def design(self) -> Design:
        """Test design over all cells."""
        contexts = sum(map(len, self.cells.values()))
        return Design(contexts, margin=self.margin, looks=self.looks)

    @property
    def assumed(self) -> tuple[float, float, float]:
        """Assumed spread of a context's difference, in the form that ``design`` takes."""
        sizes = [(len(rows), self.pairs[cell] // len(rows)) for cell, rows in self.cells.items()]
        return assumed_spread(sizes)

    @cached_property
    def cells(self) -> dict[Cell, Sequence[int]]:
        """Numbers of each cell's contexts in the order of asking: seeds, or rows of a file."""
        seeds = range(self.seed, self.seed + self.contexts)
        numbers: dict[Cell, Sequence[int]] = {
            (task, length): seeds for length in self.lengths for task in self.tasks
        }
        numbers |= {(cell.task, cell.length): cell.rows for cell in self.taken}
        return dict(sorted(numbers.items(), key=lambda item: -item[0][1]))

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Tokens of each context of a file, by name; other contexts have their cell's length."""
        return {
            context_name(cell.task, cell.length, row): size
            for cell in self.taken
            for row, size in zip(cell.rows, cell.sizes, strict=True)
        }

    @property
    def longest(self) -> int:
        """Number of tokens in the longest context with its question and answer."""
        if self.tasks:
            return max(self.lengths)
        return max((cell.longest for cell in self.taken), default=0)

    @property
    def pairs(self) -> dict[Cell, int]:
        """Number of paired questions in each cell."""
        counts = {cell: len(rows) * self.questions for cell, rows in self.cells.items()}
        return counts | {(cell.task, cell.length): sum(cell.questions) for cell in self.taken}

    @property
    def control_length(self) -> int:
        """Number of tokens in the control's contexts: :data:`CONTROL_SHARE` of ``index_topk``."""
        return int(CONTROL_SHARE * self.selects_all)

    @cached_property
    def planned(self) -> tuple[Planned, ...]:
        """Every context, in the order of asking: the control, then round by round over the cells.

        So each look has the same share of every cell, and any drift affects all cells alike. The
        longest contexts come first: their rate, the slowest, gives an upper bound for the total
        time.
        """
        length = self.control_length
        control = [
            Planned(context_name(CONTROL, length, n), CONTROL, length, CONTROL_LOOK, True)
            for n in range(CONTROL_CONTEXTS * max(1, len(self.tasks)))
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
        rounds.sort(key=lambda entry: entry[0])  # a stable sort keeps the cells' order
        return (*control, *(planned for _, planned in rounds))

    def in_words(self) -> list[tuple[str, str]]:
        """Return what is asked and what loss it can show, and warn if that exceeds the margin."""
        lengths = ", ".join(format_length(length) for length in self.lengths)
        pairs = sum(self.pairs.values())
        generated = f"{self.contexts} of each of {', '.join(self.tasks)} at {lengths}; "
        counts = (
            f"{counted(len(self.cells), 'cell')}, {counted(pairs, 'paired question')}; control "
            f"({CONTROL}) at {self.control_length} tokens"
        )
        design = self.design
        assumption = (
            f"{DISCORDANCE:.0%} of the pairs differ, with a correlation of {CORRELATION:g} within "
            "a context"
        )
        rows = [
            ("contexts", generated * bool(self.tasks) + counts),
            (
                "can show",
                f"a loss of {100 * design.detectable(*self.assumed):.1f} points, with "
                f"{design.power:.0%} probability, if {assumption} (assumed here, measured in the "
                f"report); {100 * self._half_blind:.1f} points if half of the cells leave the "
                "claim, because the pattern known to be bad is not seen to lose there",
            ),
        ]
        if self.margin > WIDEST:
            rows.append(
                (
                    "warning",
                    f"a margin of {points(self.margin)} makes the claim empty: it is more than a "
                    "tenth of what any model can get right. Take a smaller --margin: at most a "
                    "tenth of what the reference gets right, and half of what the control loses; "
                    "the verdict says whether it was.",
                )
            )
        if (contexts := design.needed(*self.assumed)) > design.contexts:
            rows.append(
                (
                    "warning",
                    f"no loss beyond {points(self.margin)} can hardly be shown: that needs "
                    f"{contexts:,} contexts under these assumptions, and {design.contexts:,} are "
                    f"planned. Plan more (--contexts), give more rows, also of the smallest cell, "
                    "which counts as much as any, or take a wider --margin.",
                )
            )
        return rows

    @property
    def _half_blind(self) -> float:
        """Loss that can be shown if half of the contexts cannot see a loss."""
        design = self.design
        half = replace(design, contexts=max(design.contexts // 2, design.looks))
        return half.detectable(*self.assumed)


def context_name(task: str, length: int, seed: int) -> str:
    """Return a context's name, unique in a plan, which ends in the seed or a file row's number."""
    return f"{task}-{length}-{seed}"
