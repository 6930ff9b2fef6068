"""What a pattern file learns from an evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from sglang_indexcache.errors import QualityError
from sglang_indexcache.evaluate.evaluation import Evaluation
from sglang_indexcache.evaluate.verdict import Look, Verdict, verdicts_of
from sglang_indexcache.library import Evaluated, add_evaluated, load_entry
from sglang_indexcache.pattern import Pattern


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
    rows = Look.at(evaluation, look).long
    asked = {(row.task, row.length) for row in rows}
    cells = asked - set(verdict.blind) or asked
    contexts = {row.context for row in rows if (row.task, row.length) in cells}
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
