"""What an evaluation leaves in its folder, all of it a pure function of what was recorded.

``report.html`` (one file, its picture inside), ``eval.json`` (every number), ``samples.jsonl``
(every answer) and ``cells.png``. The same record gives the same bytes: no clock, no machine and no
order of a dictionary that is not the record's own goes into them.

The verdicts are the primary result. What is said by task and length is secondary: it helps to see
where a loss sits, and proves nothing by itself, because with so many numbers some are far out by
chance. Its intervals are those of one look at 5 % on each side.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from sglang_indexcache.errors import QualityError
from sglang_indexcache.evaluate.evaluation import Evaluation
from sglang_indexcache.evaluate.verdict import Look, Verdict, Verdicts, verdicts_of
from sglang_indexcache.library import Evaluated, add_evaluated, load_entry
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.stats.bounds import Estimate
from sglang_indexcache.stats.pairs import Flips, paired
from sglang_indexcache.study.plots import make_figure, save_figure
from sglang_indexcache.support.files import write_json, write_whole
from sglang_indexcache.support.lengths import format_length, points

TEMPLATE = Path(__file__).parent / "report.html"
SAMPLE = (
    *("arm", "repeat", "context", "question", "task", "length", "depth", "right"),
    *("nll", "probability", "tokens"),
)
"""Of an answer, what is written into ``samples.jsonl``."""
NOISE = "A/A"
"""How the reference asked twice is called where it stands beside the arms."""
ONE_LOOK = 1.6448536269514722
"""The standard normal value that 5 % lie above."""
COLOURS = ("#1f5fa8", "#c9711a", "#2c8a4b", "#8d5fb0", "#b5476d", "#4a9aa5")
GREY, MARGIN = "#9a9a9a", "#c0392b"


@dataclass(frozen=True)
class CellDifference:
    """An arm against the reference in one cell.

    Attributes:
        arm: its name, or :data:`NOISE`.
        task: of the cell.
        length: tokens; 0 where a log does not tell.
        reference: mean of the reference, 0 to 1; ``level`` that of the arm.
        mean: difference over the contexts that both answered: 0.01 is a point.
        low: its lower bound, 5 % beyond it.
        high: the other.
        contexts: behind it.
        flips: right answers that differ.
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
    """Write every file.

    Args:
        folder: made if missing; what is there under the same names is replaced.

    Returns:
        The sentences to paste, one a line, and below them what was evaluated.
    """
    verdicts, cells = verdicts_of(evaluation), cell_differences(evaluation)
    picture = draw_cells(evaluation, cells, folder / "cells.png")
    write_json(folder / "eval.json", record(evaluation, verdicts, cells))
    samples = ({name: getattr(row, name) for name in SAMPLE} for row in evaluation.answers)
    lines = (json.dumps(one, ensure_ascii=False) for one in samples)
    write_whole(folder / "samples.jsonl", "".join(f"{line}\n" for line in lines))
    write_whole(folder / "report.html", page(evaluation, verdicts, cells, picture))
    return "\n".join([*sentences(verdicts), provenance(evaluation)])


def sentences(verdicts: Verdicts) -> list[str]:
    """To paste, one for each pattern."""
    if not verdicts:
        return ["No verdict yet: the first look has not been reached."]
    return [verdict.sentence for _, verdict in verdicts.values()]


def provenance(evaluation: Evaluation) -> str:
    """What was evaluated and how, in a sentence or two."""
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
    said = "; ".join(part for part in parts if part)
    if not evaluation.verified:
        return f"{said}. Answers and scores of another harness. Pattern not verified by a server."
    how = "right to the letter, teacher-forced"
    if evaluation.endpoint == "probability":
        how = "the probability of the right answer"
    return f"{said}. Endpoint: {how}."


def cell_differences(evaluation: Evaluation) -> list[CellDifference]:
    """Every arm in every task at every length, A/A first."""
    look = Look(evaluation)
    own = look.right_share(look.reference)
    arms = [(arm.name, arm.name, 0) for arm in evaluation.others]
    found = []
    for name, arm, repeat in [(NOISE, look.reference, 1), *arms]:
        for cell in sorted(own):
            here = [row for row in look.long if row.cell == cell]
            if not any((row.arm, row.repeat) == (arm, repeat) for row in here):
                continue
            pairs = paired(here, arm, look.reference, repeat=repeat)
            estimate = Estimate(pairs)
            low, high = estimate.guarded(ONE_LOOK), estimate.upper(ONE_LOOK)
            mean, level = float(estimate.mean), estimate.level
            numbers = own[cell], level + mean, mean, float(low), float(high)
            reason = look.blind[cell].reason if cell in look.blind else ""
            found.append(CellDifference(name, *cell, *numbers, len(pairs), pairs.flips, reason))
    return found


def control(evaluation: Evaluation) -> dict[str, Flips]:
    """What differs where every pattern selects everything: nothing, or nothing is claimed."""
    rows = Look(evaluation).control
    asked = {row.arm for row in rows}
    return {
        arm.name: paired(rows, arm.name, evaluation.reference.name).flips
        for arm in evaluation.others
        if arm.name in asked
    }


def record(
    evaluation: Evaluation, verdicts: Verdicts, cells: list[CellDifference]
) -> dict[str, Any]:
    """``eval.json``: the sentences first, then the plan, then every number of the report."""
    data = {
        "sentences": sentences(verdicts),
        "provenance": provenance(evaluation),
        "verdicts": [
            {"look": look, **asdict(verdict), "kind": verdict.kind.name.lower()}
            for look, verdict in verdicts.values()
        ],
        "facts": dict(evaluation.facts),
        "design": asdict(evaluation.design),
        "endpoint": evaluation.endpoint,
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
        "missing": [asdict(missing) for missing in evaluation.missing],
        "notices": list(evaluation.notices),
        "control": {name: asdict(flips) for name, flips in control(evaluation).items()},
        "cells": [asdict(cell) for cell in cells],
    }
    found: dict[str, Any] = _finite(data)
    return found


def _finite(value: Any) -> Any:
    """JSON values; infinite bounds become null."""
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


def page(
    evaluation: Evaluation, verdicts: Verdicts, cells: list[CellDifference], picture: Path | None
) -> str:
    """``report.html``."""
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
        blind={(one.task, one.length): one.blind for one in cells if one.blind},
        control=control(evaluation),
        margin=points(evaluation.design.margin),
        provenance=provenance(evaluation),
        planned=len(evaluation.long),
        lost=len(evaluation.lost),
        picture=base64.b64encode(picture.read_bytes()).decode() if picture else "",
        facts=[(name, _words(value)) for name, value in facts if value],
    )


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_words(item)}" for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return " ".join(_words(item) for item in value)
    return str(value)


def draw_cells(evaluation: Evaluation, cells: list[CellDifference], path: Path) -> Path | None:
    """Differences by task and length, one panel a pattern, with the margin and the A/A noise."""
    path.unlink(missing_ok=True)
    places = sorted({(cell.task, cell.length) for cell in cells})
    arms = [arm.name for arm in evaluation.candidates]
    noise = {(one.task, one.length): one for one in cells if one.arm == NOISE}
    if not places:
        return None
    figure, axes = make_figure(
        7.6, 1.5 + 0.27 * len(places), columns=len(arms), sharex=True, sharey=True
    )
    for number, (axis, arm) in enumerate(zip(axes, arms, strict=True)):
        axis.axvline(0, color="black", lw=0.8)
        axis.axvline(-100 * evaluation.design.margin, color=MARGIN, lw=1, ls="--", label="margin")
        for cell in cells:
            height = places.index((cell.task, cell.length))
            if cell.arm == arm:
                colour = GREY if cell.blind else COLOURS[number % len(COLOURS)]
                ends = [100 * float(np.clip(end, -1, 1)) for end in (cell.low, cell.high)]
                axis.plot(ends, [height] * 2, color=colour, lw=1.6, solid_capstyle="butt")
                axis.plot(100 * cell.mean, height, color=colour, marker="o", ms=4.5)
                if again := noise.get((cell.task, cell.length)):
                    axis.plot(100 * again.mean, height, "k|", ms=9, label="A/A")
        axis.set_title(arm, fontsize=9, loc="left")
        axis.set_xlabel("difference, points", fontsize=8)
        axis.tick_params(labelsize=8)
    labels = [f"{task} {format_length(length)}" if length else task for task, length in places]
    axes[0].set_yticks(range(len(places)), labels)
    axes[0].set_ylim(len(places) - 0.4, -0.6)
    handles, names = axes[0].get_legend_handles_labels()
    once = dict(zip(names, handles, strict=True))
    figure.legend(
        once.values(), once.keys(), loc="outside lower center", ncols=2, fontsize=8, frameon=False
    )
    save_figure(figure, path)
    return path


def write_quality(path: Path, evaluation: Evaluation) -> str:
    """Write the verdict on a pattern file's pattern into its ``quality`` section.

    Returns:
        The verdict in words.

    Raises:
        QualityError: the evaluation has no such pattern or another endpoint, or nothing was
            decided yet.
        LibraryError: the file is no pattern file.
    """
    entry = load_entry(path)
    if evaluation.endpoint != "answers":
        raise QualityError(
            f"this evaluation compared the {evaluation.endpoint} of right answers, and a pattern "
            "file keeps verdicts on right answers; evaluate with --endpoint answers"
        )
    mine = [arm for arm in evaluation.candidates if Pattern(arm.pattern) == entry.parsed]
    if not mine:
        names = ", ".join(arm.name for arm in evaluation.candidates)
        raise QualityError(f"{path} has another pattern than those evaluated ({names})")
    found = verdicts_of(evaluation).get(mine[0].name)
    if found is None:
        raise QualityError("the first look has not been reached; let the evaluation go on")
    row = evaluated(evaluation, *found)
    add_evaluated(path, row)
    return str(row)


def evaluated(evaluation: Evaluation, look: int, verdict: Verdict) -> Evaluated:
    """A verdict, reached at a look, with what decides for whom it holds.

    The lengths and tasks are those that the claim is about; cells that could not see are named.
    """
    rows = Look(evaluation, look).long
    asked = {row.cell for row in rows}
    cells = asked - set(verdict.blind) or asked
    contexts = {row.context for row in rows if row.cell in cells}
    return Evaluated(
        verdict=cast(Any, verdict.kind.name.lower().replace("_", " ")),
        margin=evaluation.design.margin,
        difference=verdict.difference,
        interval=verdict.interval,
        contexts=len(contexts),
        pairs=verdict.flips.pairs if verdict.flips else 0,
        tasks=tuple(sorted({task for task, _ in cells})),
        lengths=tuple(sorted({length for _, length in cells})),
        blind=tuple(f"{task} at {length}" for task, length in sorted(asked - cells)),
        checkpoint=str(evaluation.facts["checkpoint"]),
        commit=str(evaluation.facts.get("commit", "")),
        date=str(evaluation.facts.get("started", ""))[:10],
    )
