"""What a pattern file learns from an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from sglang_indexcache.errors import QualityError
from sglang_indexcache.evaluate.evaluation import Arm, Evaluation, Role
from sglang_indexcache.evaluate.verdict import Kind, Verdict, Verdicts, verdicts_of
from sglang_indexcache.library import Evaluated, add_evaluated, load_entry
from sglang_indexcache.pattern import Pattern

_WORDS: dict[
    Kind, Literal["no loss", "small loss", "loss", "undecided", "cannot see", "invalid"]
] = {
    Kind.NO_LOSS: "no loss",
    Kind.SMALL_LOSS: "small loss",
    Kind.LOSS: "loss",
    Kind.UNDECIDED: "undecided",
    Kind.CANNOT_SEE: "cannot see",
    Kind.INVALID: "invalid",
}


def check_entry(path: Path, arms: Sequence[Arm], *, verified: bool = True) -> Arm:
    """Whether a verdict can be written into a file; also before hours of work for it.

    Args:
        path: of the pattern file.
        arms: of the evaluation.
        verified: whether the servers say which pattern they run.

    Returns:
        The candidate whose pattern it is.

    Raises:
        QualityError: no verdict will belong there.
        LibraryError: the file is no pattern file.
    """
    entry = load_entry(path)
    if not verified:
        raise QualityError(
            "the server does not say which pattern it runs, so nothing is written into a pattern "
            "file. Evaluate on a server with this plugin"
        )
    candidates = [arm for arm in arms if arm.role is Role.CANDIDATE]
    mine = [arm for arm in candidates if Pattern(arm.pattern) == entry.parsed]
    if not mine:
        names = ", ".join(arm.name for arm in candidates)
        raise QualityError(f"{path} has another pattern than those evaluated ({names})")
    return mine[0]


def write_quality(path: Path, evaluation: Evaluation, verdicts: Verdicts | None = None) -> str:
    """Write the verdict on a pattern file's pattern into its ``quality`` section.

    Returns:
        The verdict in words.

    Raises:
        QualityError: nothing was decided yet; or see :func:`check_entry`.
        LibraryError: the file is no pattern file.
    """
    mine = check_entry(path, evaluation.arms, verified=evaluation.pattern_verified)
    found = (verdicts_of(evaluation) if verdicts is None else verdicts).get(mine.name)
    if found is None:
        raise QualityError("the first look has not been reached; let the evaluation go on")
    row = evaluated(evaluation, *found)
    add_evaluated(path, row)
    return str(row)


def evaluated(evaluation: Evaluation, look: int, verdict: Verdict) -> Evaluated:
    """A verdict, reached at a look, with what decides for whom it holds.

    The lengths and tasks are those that the claim is about; cells that could not see are named.
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
        blind=tuple(f"{task} at {length}" for task, length in sorted(asked - cells)),
        checkpoint=str(evaluation.facts["checkpoint"]),
        commit=str(evaluation.facts.get("commit", "")),
        date=str(evaluation.facts.get("started", ""))[:10],
    )
