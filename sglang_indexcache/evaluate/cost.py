"""What an evaluation computes at most, and what it can show: told before the first request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from sglang_indexcache.errors import QualityError
from sglang_indexcache.evaluate.corpus import Corpus
from sglang_indexcache.evaluate.evaluation import Arm, Planned
from sglang_indexcache.evaluate.plan import (
    AGAIN_EVERY,
    CORRELATION,
    DISCORDANCE,
    PROBABILITY_DEVIATION,
    EvaluationPlan,
    SelectedRows,
    context_name,
)
from sglang_indexcache.evaluate.verdict import points
from sglang_indexcache.study.cost import Cost
from sglang_indexcache.support.lengths import counted, format_length

_ASSUMED = {
    "answers": f"{DISCORDANCE:.0%} of the pairs differ, with a correlation of {CORRELATION:g} "
    "within a context",
    "probability": "a context's difference in probability has a standard deviation of "
    f"{100 * PROBABILITY_DEVIATION:g} points",
}
PAGE = 64
"""Tokens of a cache page: what is left of a context's last one is computed for each question."""


def tokens_at_most(plan: EvaluationPlan, arms: int, tails: Mapping[str, int]) -> Counter[int]:
    """What the whole plan computes, if nothing is decided early, by length.

    Args:
        plan: what will be asked.
        arms: asked on every context: the reference, the candidates and the positive control.
        tails: tokens of a question and its answer, by task; none of a file's, which is all context.
    """
    tokens: Counter[int] = Counter()
    for planned in plan.planned:
        size, tail = plan.sizes.get(planned.context, planned.length), tails.get(planned.task, 0)
        one = size + plan.questions_of(planned.task) * (tail + (size - tail) % PAGE)
        tokens[planned.length] += one * (arms + planned.again)
    return tokens


def tails(plan: EvaluationPlan, corpus: Corpus) -> dict[str, int]:
    """Tokens of a question with its answer, on average, from a short context of each task."""
    found = {}
    for task in plan.tasks:
        length = min(plan.lengths)
        context = corpus.make(
            Planned(context_name(task, length, plan.seed), task, length, 1, False)
        )
        asked = [len(question.ids) + len(question.answer) for question in context.questions]
        found[task] = round(sum(asked) / len(asked))
    return found


def check_fits(plan: EvaluationPlan, info: Mapping[str, object], where: str) -> None:
    """Refuse contexts that a server does not take.

    Args:
        plan: what will be asked.
        info: the server's ``/server_info``, which may name the longest prompt that it takes.
        where: the server's address.

    Raises:
        QualityError: a length is above that.
    """
    most = info.get("max_req_input_len")
    if isinstance(most, int) and plan.longest > most:
        raise QualityError(
            f"a context of {plan.longest:,} tokens with question and answer does not fit {where}, "
            f"which takes prompts of {most:,}. Ask for shorter ones (--length), or start it with a "
            "larger --context-length and --max-total-tokens."
        )


def in_words(
    plan: EvaluationPlan, arms: Sequence[Arm], cost: Cost, notices: Sequence[str] = ()
) -> list[tuple[str, str]]:
    """What will be asked, what it costs, and what it can show; a name and a sentence each."""
    design, cells = plan.design, plan.cells
    lengths = ", ".join(format_length(length) for length in plan.lengths)
    pairs = sum(len(rows) * plan.questions_of(task) for (task, _), rows in cells.items())
    made = f"{plan.contexts} of each of {', '.join(plan.tasks)} at {lengths}; " * bool(plan.tasks)
    shown = design.detectable(*plan.assumed)
    rows = [
        (
            "arms",
            f"{', '.join(f'{arm.name} ({arm.role.value})' for arm in arms)}; the reference again "
            f"on every {AGAIN_EVERY}th context (A/A)",
        ),
        *(("file", notice) for notice in notices),
        (
            "contexts",
            f"{made}{counted(len(cells), 'cell')}, {counted(pairs, 'paired question')}; control at "
            f"{plan.control_length} tokens",
        ),
        (
            "cost",
            f"{cost.in_words()}; looks: {plan.looks}, the evaluation ends at the one that decides",
        ),
        (
            "can show",
            f"a loss of {100 * shown:.1f} points, with {design.power:.0%} probability, if "
            f"{_ASSUMED[plan.endpoint]} (assumed here, measured in the report)",
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
