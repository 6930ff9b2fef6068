"""What a pattern file learns from an evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from sglang_indexcache.errors import QualityError
from sglang_indexcache.library import Evaluated, add_evaluated, load_entry
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.quality.evaluation import Evaluation
from sglang_indexcache.quality.summary import Verdicts
from sglang_indexcache.quality.verdict import Kind, Verdict

_WORDS: dict[Kind, Literal["no loss", "loss", "undecided", "cannot see", "invalid"]] = {
    Kind.NO_LOSS: "no loss",
    Kind.LOSS: "loss",
    Kind.UNDECIDED: "undecided",
    Kind.CANNOT_SEE: "cannot see",
    Kind.INVALID: "invalid",
}


def write_quality(path: Path, evaluation: Evaluation, verdicts: Verdicts | None = None) -> str:
    """Write the verdict on a pattern file's pattern into its ``quality`` section.

    Returns:
        The verdict in words.

    Raises:
        QualityError: the pattern was not evaluated, nothing was decided yet, or nobody knows which
            pattern the answers were made with.
        LibraryError: the file is no pattern file.
    """
    entry = load_entry(path)
    if not evaluation.pattern_verified:
        raise QualityError(
            "the server did not say which pattern it ran, so nothing is written into a pattern "
            "file. Evaluate on a server with this plugin"
        )
    mine = [arm for arm in evaluation.candidates if Pattern(arm.pattern) == entry.parsed]
    if not mine:
        names = ", ".join(arm.name for arm in evaluation.candidates)
        raise QualityError(f"{path} has another pattern than those evaluated ({names})")
    found = (evaluation.verdicts() if verdicts is None else verdicts).get(mine[0].name)
    if found is None:
        raise QualityError("the first look has not been reached; let the evaluation go on")
    row = evaluated(evaluation, *found)
    add_evaluated(path, row)
    return str(row)


def evaluated(evaluation: Evaluation, look: int, verdict: Verdict) -> Evaluated:
    """A verdict, reached at a look, with what decides for whom it holds.

    The lengths and tasks are those that the claim is about: cells that could not see are left out.
    """
    rows = [row for row in evaluation.outcomes(look=look) if row.length > evaluation.selects_all]
    asked = {(row.task, row.length) for row in rows}
    cells = asked - set(verdict.blind) or asked
    contexts = {row.context for row in rows if (row.task, row.length) in cells}
    return Evaluated(
        verdict=_WORDS[verdict.kind],
        margin=evaluation.margin,
        difference=verdict.difference,
        interval=verdict.interval,
        contexts=len(contexts),
        pairs=verdict.flips.pairs if verdict.flips else 0,
        tasks=tuple(sorted({task for task, _ in cells})),
        lengths=tuple(sorted({length for _, length in cells})),
        checkpoint=str(evaluation.facts["checkpoint"]),
        commit=str(evaluation.facts.get("commit", "")),
        date=str(evaluation.facts.get("started", ""))[:10],
    )
