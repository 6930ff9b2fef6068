"""Report of an evaluation in its folder, a pure function of the record.

The same record gives the same bytes: no clock, machine or dictionary order other than the record's
own affects them. Results by task and length are secondary: they help to see where a loss arises,
and prove nothing by themselves. Their intervals are for a single look, with 5 % on each side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sglang_indexcache.lab.evaluate.evaluation import Evaluation
from sglang_indexcache.lab.evaluate.tasks.files import BY_TOKEN
from sglang_indexcache.lab.evaluate.verdict import Look, Verdicts, verdicts_of
from sglang_indexcache.lab.stats.bounds import Estimate
from sglang_indexcache.lab.stats.pairs import Flips, paired
from sglang_indexcache.library.lengths import format_length, points
from sglang_indexcache.library.writing import write_json, write_whole

TEMPLATE = Path(__file__).parent / "report.html"
NOISE = "A/A"
"""Name of the repeated reference in tables of arms."""
ONE_LOOK = 1.6448536269514722
"""Standard normal value with 5 % above it."""


@dataclass(frozen=True)
class CellDifference:
    """Difference between an arm and the reference in one cell.

    Attributes:
        arm: its name, or :data:`NOISE`.
        length: number of tokens; 0 if a log does not tell.
        reference: mean of the reference, 0 to 1; ``level`` is the arm's.
        mean: difference over the contexts that both answered (0.01 is a point), with 5 % below
            ``low`` and 5 % above ``high``.
        blind: why the cell left the claim; empty if it did not.
    """

    arm: str
    task: str
    length: int
    reference: float
    level: float
    mean: float
    low: float
    high: float
    contexts: int
    flips: Flips
    blind: str


def write_report(evaluation: Evaluation, folder: Path) -> str:
    """Write every file; return the sentences to paste, followed by what was evaluated."""
    verdicts, cells = verdicts_of(evaluation), cell_differences(evaluation)
    write_json(folder / "eval.json", record(evaluation, verdicts, cells))
    write_whole(folder / "report.html", page(evaluation, verdicts, cells))
    return "\n".join([*sentences(verdicts), provenance(evaluation)])


def sentences(verdicts: Verdicts) -> list[str]:
    """Return the sentences to paste, one for each pattern."""
    if not verdicts:
        return ["No verdict yet: the first look has not been reached."]
    return [verdict.sentence for _, verdict in verdicts.values()]


def provenance(evaluation: Evaluation) -> str:
    """Return a sentence or two on what was evaluated, and how."""
    facts = evaluation.facts
    lengths = ", ".join(format_length(length) for length in evaluation.lengths if length)
    flags = facts.get("flags", "")
    parts = [
        f"Tasks {', '.join(evaluation.tasks)}",
        f"lengths {lengths}" if lengths else "",
        f"margin {points(evaluation.design.margin)}",
        f"model {facts['model']}" if facts.get("model") else "",
        f"checkpoint {str(facts['checkpoint'])[:12]}" if facts.get("checkpoint") else "",
        f"commit {facts['commit']}" if facts.get("commit") else "",
        f"flags {flags if isinstance(flags, str) else ' '.join(flags)}" if flags else "",
        str(facts["started"])[:10] if facts.get("started") else "",
    ]
    text = "; ".join(part for part in parts if part)
    if not evaluation.verified:
        return f"{text}. Answers and scores of another harness. Pattern not verified by a server."
    by_token = [task for task in evaluation.tasks if task in BY_TOKEN]
    endpoints = ["right to the letter"] * (len(by_token) < len(evaluation.tasks))
    endpoints += [f"share of tokens right in {task}" for task in by_token]
    return f"{text}. Endpoint: {', '.join(endpoints)}, teacher-forced."


def cell_differences(evaluation: Evaluation) -> list[CellDifference]:
    """Compare every arm with the reference in every cell, A/A first."""
    look = Look(evaluation)
    reference_means = look.right_share(look.reference)
    arms = [(arm.name, arm.name, 0) for arm in evaluation.compared_arms]
    differences = []
    for name, arm, repeat in [(NOISE, look.reference, 1), *arms]:
        for cell in sorted(reference_means):
            rows = [row for row in look.long if row.cell == cell]
            if not any((row.arm, row.repeat) == (arm, repeat) for row in rows):
                continue
            pairs = look.compared(arm, cells=[cell], repeat=repeat)
            estimate = Estimate(pairs)
            low, high = estimate.guarded(ONE_LOOK), estimate.upper(ONE_LOOK)
            mean, level = float(estimate.mean), estimate.level
            numbers = reference_means[cell], level + mean, mean, float(low), float(high)
            reason = look.blind[cell].reason if cell in look.blind else ""
            counts = len(pairs), pairs.flips
            differences.append(CellDifference(name, *cell, *numbers, *counts, reason))
    return differences


def control(evaluation: Evaluation) -> dict[str, Flips]:
    """Count differences on the control, where every pattern selects everything, and in A/A."""
    rows, reference = Look(evaluation).control, evaluation.reference.name
    answered = {(row.arm, row.repeat) for row in rows}
    arms = [(arm.name, 0, arm.name) for arm in evaluation.compared_arms]
    return {
        title: paired(rows, name, reference, repeat=repeat).flips
        for name, repeat, title in [*arms, (reference, 1, f"{reference} again")]
        if (name, repeat) in answered
    }


def record(
    evaluation: Evaluation, verdicts: Verdicts, cells: list[CellDifference]
) -> dict[str, Any]:
    """Make ``eval.json``: sentences first, then the plan, then every number of the report."""
    data = {
        "sentences": sentences(verdicts),
        "provenance": provenance(evaluation),
        "verdicts": [
            {"look": look, **asdict(verdict), "kind": verdict.kind.name.lower()}
            for look, verdict in verdicts.values()
        ],
        "facts": dict(evaluation.facts),
        "design": asdict(evaluation.design),
        "arms": [
            {"name": arm.name, "pattern": arm.pattern, "role": arm.role.value}
            for arm in evaluation.arms
        ],
        "selects_all": evaluation.selects_all,
        "tasks": list(evaluation.tasks),
        "lengths": list(evaluation.lengths),
        "finished": evaluation.finished,
        "tokens": evaluation.tokens,
        "seconds": evaluation.seconds,
        "notices": list(evaluation.notices),
        "control": {name: asdict(flips) for name, flips in control(evaluation).items()},
        "cells": [asdict(cell) for cell in cells],
    }
    finite: dict[str, Any] = _finite(data)
    return finite


def _finite(value: Any) -> Any:
    """Convert to JSON values; infinite bounds become null."""
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


def page(evaluation: Evaluation, verdicts: Verdicts, cells: list[CellDifference]) -> str:
    """Render ``report.html``."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "points": lambda value: f"{100 * value:+.1f}" if abs(value) <= 1 else "unknown",
        "percent": lambda value: f"{100 * value:.1f}",
        "length": lambda value: format_length(value) if value else "",
    }
    facts = [*evaluation.facts.items(), ("tokens computed", f"{evaluation.tokens:,}")]
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        evaluation=evaluation,
        verdicts=verdicts,
        cells=cells,
        blind={(cell.task, cell.length): cell.blind for cell in cells if cell.blind},
        control=control(evaluation),
        margin=points(evaluation.design.margin),
        provenance=provenance(evaluation),
        planned=len(evaluation.long),
        facts=[(name, _words(value)) for name, value in facts if value],
    )


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_words(item)}" for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return " ".join(_words(item) for item in value)
    return str(value)
