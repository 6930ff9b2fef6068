"""What a user asks of an evaluation: which arms, what it costs at most, and what it can show."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from sglang_indexcache.checkpoint import Checkpoint
from sglang_indexcache.errors import PatternError, QualityError
from sglang_indexcache.evaluate.corpus import Corpus
from sglang_indexcache.evaluate.evaluation import Arm, Role
from sglang_indexcache.evaluate.plan import (
    AGAIN_EVERY,
    CORRELATION,
    DISCORDANCE,
    PAGE,
    PROBABILITY_DEVIATION,
    EvaluationPlan,
    Planned,
    SelectedRows,
    context_name,
)
from sglang_indexcache.library import Library
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.study.cost import Cost, Rate, print_plan
from sglang_indexcache.support.lengths import counted, format_length, points

CONTROLS = ("uniform:1/4", "uniform:1/8")
"""Positive controls, if the user gives none: the first that is no candidate. They lose a little.

A control that breaks everything would be seen to lose by a task that no real loss shows in.
"""
LAST_CONTROL = "first-layer-only"
"""Where none of them is left, or allowed: F, then S."""
_ASSUMED = {
    "answers": f"{DISCORDANCE:.0%} of the pairs differ, with a correlation of {CORRELATION:g} "
    "within a context",
    "probability": "a context's difference in probability has a standard deviation of "
    f"{100 * PROBABILITY_DEVIATION:g} points",
}


def arms_of(model: Path, against: str, patterns: Sequence[str], control: str) -> tuple[Arm, ...]:
    """The reference, the candidates from most to fewest full layers, the positive control.

    Args:
        model: the checkpoint's folder.
        against: the reference, in any form of a pattern.
        patterns: likewise, the candidates.
        control: likewise, known to be bad; empty for one of :data:`CONTROLS`.

    Raises:
        QualityError: two arms are the same pattern, or there is nothing to compare.
        PatternError, LibraryError: a pattern that is none, or not for this checkpoint.
    """
    checkpoint, library = Checkpoint.read(model), Library.default()

    def arm(value: str, role: Role) -> Arm:
        name = Path(value).stem if value.endswith((".yaml", ".yml")) else value
        return Arm(name, str(library.resolve(value, checkpoint).pattern), role)

    candidates = [arm(value, Role.CANDIDATE) for value in patterns]
    candidates.sort(key=lambda one: -one.pattern.count("F"))
    arms = [arm(against, Role.REFERENCE), *candidates]
    if control:
        arms.append(arm(control, Role.BAD))
    else:
        controls = []
        for value in CONTROLS:
            with suppress(PatternError):  # this checkpoint has no such indexers
                controls.append(arm(value, Role.BAD))
        first = str(Pattern("F" + "S" * (checkpoint.num_layers - 1)))
        controls.append(Arm(LAST_CONTROL, first, Role.BAD))
        taken = {one.pattern for one in arms}
        arms.append(next((one for one in controls if one.pattern not in taken), controls[0]))
    for place, one in enumerate(arms):
        for other in arms[:place]:
            if one.pattern == other.pattern:
                raise QualityError(
                    f"{one.name} and {other.name} are the same pattern, {one.pattern}; an arm "
                    "compared with itself says nothing. Give another (--against, --control)."
                )
            if one.name == other.name:
                raise QualityError(f"two patterns are called {one.name}; give each once")
    return tuple(arms)


@dataclass(frozen=True)
class EvaluationRequest:
    """What a user asked for.

    Attributes:
        model: the checkpoint's folder.
        arms: what to ask it of; see :func:`arms_of`.
        plan: what to ask.
        corpus: what contexts are made of.
        flags: of the command, to print beside the verdict.
        rate: how fast the servers compute tokens, if it is known.
        notices: what a reader must know besides: which rows of files are asked.
    """

    model: Path
    arms: tuple[Arm, ...]
    plan: EvaluationPlan
    corpus: Corpus
    flags: str
    rate: Rate | None = None
    notices: tuple[str, ...] = ()

    def tokens(self) -> int:
        """What the whole plan computes if nothing is decided early.

        A question and its answer are computed behind the whole pages of their context; those of a
        file's row are counted as context.
        """
        tails, tokens = self._tails(), 0
        for planned in self.plan.planned:
            size = self.plan.sizes.get(planned.context, planned.length)
            tail = tails.get(planned.task, 0)
            one = size + self.plan.questions_of(planned.task) * (tail + (size - tail) % PAGE)
            tokens += one * (len(self.arms) + planned.again)
        return tokens

    def _tails(self) -> dict[str, int]:
        """Tokens of a question with its answer, on average, from a short context of each task."""
        found, length = {}, min(self.plan.lengths)
        for task in self.plan.tasks:
            name = context_name(task, length, self.plan.seed)
            context = self.corpus.make(Planned(name, task, length, 1, False))
            asked = [len(question.ids) + len(question.answer) for question in context.questions]
            found[task] = round(sum(asked) / len(asked))
        return found

    def tell(self, console: Console) -> Cost:
        """Print what will be asked, what it costs, and what it can show.

        Returns:
            The cost.
        """
        cost = Cost(self.tokens(), self.rate)
        arms = ", ".join(f"{arm.name} ({arm.role.value})" for arm in self.arms)
        rows = [
            ("arms", f"{arms}; the reference again on every {AGAIN_EVERY}th context (A/A)"),
            *(("file", notice) for notice in self.notices),
            ("contexts", contexts_in_words(self.plan)),
            (
                "cost",
                f"{cost.in_words()}; looks: {self.plan.looks}, the evaluation ends at the one that "
                "decides",
            ),
            *shown_in_words(self.plan),
        ]
        print_plan(console, rows)
        return cost


def contexts_in_words(plan: EvaluationPlan) -> str:
    """How many contexts and questions, of what."""
    cells = plan.cells
    lengths = ", ".join(format_length(length) for length in plan.lengths)
    pairs = sum(len(rows) * plan.questions_of(task) for (task, _), rows in cells.items())
    made = f"{plan.contexts} of each of {', '.join(plan.tasks)} at {lengths}; " * bool(plan.tasks)
    return (
        f"{made}{counted(len(cells), 'cell')}, {counted(pairs, 'paired question')}; control at "
        f"{plan.control_length} tokens"
    )


def shown_in_words(plan: EvaluationPlan) -> list[tuple[str, str]]:
    """What loss the plan can show; and a warning, with the mend, if that is not its margin."""
    design = plan.design
    rows = [
        (
            "can show",
            f"a loss of {100 * design.detectable(*plan.assumed):.1f} points, with "
            f"{design.power:.0%} probability, if {_ASSUMED[plan.endpoint]} (assumed here, measured "
            "in the report)",
        ),
    ]
    if (contexts := design.needed(*plan.assumed)) > design.contexts:
        rows.append(
            (
                "warning",
                f"no loss beyond {points(plan.margin)} can hardly be shown: that needs "
                f"{contexts:,} contexts under these assumptions, and {design.contexts:,} are "
                f"planned. {_mend(plan)}, or take a wider --margin.",
            )
        )
    return rows


def _mend(plan: EvaluationPlan) -> str:
    """How a plan would show its margin."""
    light = min(plan.taken, key=lambda cell: len(cell.rows), default=None)
    if light and _shows_less_with(plan, light):
        return (
            f"{light.task} at {light.length:,} tokens has only {len(light.rows):,} and counts as "
            "much as every other cell: give more rows of it, or leave it out (that file, or that "
            "--length)"
        )
    if plan.tasks or any(len(cell.rows) < cell.available for cell in plan.taken):
        return "Plan more (--contexts)"
    return "The files have no more: ask generated tasks beside them (--task)"


def _shows_less_with(plan: EvaluationPlan, light: SelectedRows) -> bool:
    """Whether the plan would show a smaller loss without its smallest cell."""
    if len(light.rows) == max(map(len, plan.cells.values())):
        return False
    others = replace(plan, taken=tuple(cell for cell in plan.taken if cell != light))
    shown, whole = (one.design.detectable(*one.assumed) for one in (others, plan))
    return shown < whole
