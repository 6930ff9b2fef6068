"""When an evaluation must not go on, because what it would say could not be believed.

Each refusal names what was seen and how to fix it. What was asked until then is kept.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict

from sglang_indexcache.errors import QualityError
from sglang_indexcache.evaluate.evaluation import Evaluation
from sglang_indexcache.evaluate.plan import CONTROL_LOOK, CORRELATION, DISCORDANCE
from sglang_indexcache.evaluate.verdict import Look, points
from sglang_indexcache.stats.bounds import Estimate
from sglang_indexcache.stats.power import spread_over_cells

MOST_MISSING = 0.01
"""Share of the planned contexts that may fail."""
ENOUGH_ALIKE = 3
"""Contexts in a row whose every log-probability agrees when two arms are taken for the same one."""


def check_control(evaluation: Evaluation) -> None:
    """The arms may differ in nothing where every pattern selects everything.

    Raises:
        QualityError: they do.
    """
    look = Look.at(evaluation, CONTROL_LOOK)
    asked = {row.arm for row in look.control}
    for name in (arm.name for arm in evaluation.others if arm.name in asked):
        if differs := look.control_differs(name):
            shortest = min(row.length for row in look.control)
            raise QualityError(f"the control failed at {shortest} tokens: {differs}")


def check_context(evaluation: Evaluation) -> None:
    """Whether what came of the last contexts may count.

    An arm that computes exactly what the reference does is not the arm that was asked for. The last
    contexts are looked at, so a server that begins to ignore patterns in the middle is refused as
    well. And contexts that fail are not a sample of all contexts.

    Raises:
        QualityError: every log-probability of an arm is the reference's; or more than one context,
            and more than :data:`MOST_MISSING` of them, failed.
    """
    failed = evaluation.missing
    if len(failed) > max(1, MOST_MISSING * len(evaluation.planned)):
        raise QualityError(
            f"{len(failed)} of {len(evaluation.planned)} contexts failed, more than "
            f"{MOST_MISSING:.0%}: what is left would be a choice of the easy ones. The last one, "
            f"{failed[-1].context} in {failed[-1].arm}: {failed[-1].reason}. Fix that, and start "
            "again with another --output."
        )
    traces: dict[str, dict[str, list[float | None]]] = defaultdict(lambda: defaultdict(list))
    long = {planned.context for planned in evaluation.long}
    for row in evaluation.answers:
        if row.context in long and not row.repeat:
            traces[row.arm][row.context].append(row.trace)
    reference = traces[evaluation.reference.name]
    for arm in evaluation.others:
        last = list(traces[arm.name].items())[-ENOUGH_ALIKE:]
        if len(last) == ENOUGH_ALIKE and all(reference.get(name) == own for name, own in last):
            raise QualityError(
                f"the server ignores the pattern, or answers from another arm's cache: behind the "
                f"last {ENOUGH_ALIKE} contexts of more than {evaluation.selects_all} tokens, "
                f"{arm.name} has every log-probability of {evaluation.reference.name}, to the last "
                "digit. Ask `indexcache server doctor --url` what it runs, and start it with "
                "--disable-radix-cache to rule the cache out."
            )


def check_floor(evaluation: Evaluation) -> None:
    """A model that cannot do the tasks cannot lose anything at them.

    Raises:
        QualityError: the reference is at the floor in every cell.
    """
    look = Look.at(evaluation)
    low = look.at_floor()
    if low and low.keys() == look.cells:
        said = ", ".join(
            f"{share:.0%} of {task} at {length:,}" for (task, length), share in low.items()
        )
        raise QualityError(
            f"the reference answers {said} right, hardly more than guessing, so "
            "no loss could be seen. Ask shorter contexts (--length) or other tasks (--task), or "
            "look whether the checkpoint and its tokenizer belong together."
        )


def check_noise(evaluation: Evaluation) -> None:
    """An engine that differs from itself too much cannot resolve the margin.

    Only where the plan could resolve it otherwise: a plan that is too small was told so before. And
    only once several contexts of every cell were asked twice, so that their spread is known.

    Raises:
        QualityError: it would need more contexts than are planned.
    """
    design, noise = evaluation.design, Look.at(evaluation).noise
    if noise is None:
        return
    estimate = Estimate(noise)
    planned = Counter((one.task, one.length) for one in evaluation.planned)
    asked = [
        (planned[cell], round(float(noise.questions[noise.cells == number].mean())))
        for number, cell in enumerate(noise.names)
    ]
    assumed = design.needed(*spread_over_cells(asked, DISCORDANCE, CORRELATION))
    if not estimate.error or not math.isfinite(estimate.error) or design.contexts < assumed:
        return
    needed = design.needed(*estimate.spread)
    if needed > design.contexts:
        raise QualityError(
            f"the reference differs from itself so often (A/A: {noise.flips}) that a margin of "
            f"{points(design.margin)} needs {needed:,} contexts, and {design.contexts:,} "
            "are planned. Start the server with deterministic kernels "
            "(--enable-deterministic-inference) if it has them, plan more (--contexts), or take a "
            "wider --margin."
        )
