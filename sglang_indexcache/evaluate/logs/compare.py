"""Two runs of any harness, paired question by question, with our statistics.

Only runs of the same questions can be compared: other tasks, other samples, other prompts or other
right answers are refused. Repeated askings of a question (epochs) are averaged, which takes out
noise and leaves one observation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from sglang_indexcache.errors import QualityError
from sglang_indexcache.evaluate.evaluation import (
    Answer,
    Arm,
    Evaluation,
    Missing,
    Mode,
    Planned,
    Role,
)
from sglang_indexcache.evaluate.logs import Log
from sglang_indexcache.evaluate.logs.sample import Sample
from sglang_indexcache.evaluate.verdict import Verdicts, judge
from sglang_indexcache.stats.pairs import Cell
from sglang_indexcache.stats.power import Design

NO_CONTROL = -1
"""For ``Evaluation.selects_all``: a log does not tell which of its prompts are short."""
MOST_UNSCORED = 0.01
ROUNDED = 5e-4
"""How far a harness may round what it prints."""
Key = tuple[str, str]
"""Task and question."""


@dataclass(frozen=True)
class LoggedQuestion:
    """A question of one run, its askings averaged.

    Attributes:
        sample: its first asking.
        value: mean score; None if no asking was scored.
    """

    sample: Sample
    value: float | None


def compare_logs(
    reference: Log,
    candidate: Log,
    *,
    margin: float = 0.01,
    again: Log | None = None,
    bad: Log | None = None,
    facts: Mapping[str, Any] | None = None,
) -> tuple[Evaluation, Verdicts]:
    """Pair the runs and judge the candidate.

    Args:
        reference: the run without sharing.
        candidate: the run with the pattern.
        margin: the loss that still counts as none; 0.01 is one point.
        again: a second run of the reference, for the engine's own noise.
        bad: a run with a pattern that is known to be bad.
        facts: to print beside the verdict.

    Raises:
        QualityError: the runs are not of the same questions, or too many have no score.
    """
    runs = {
        (log.name, repeat): _questions(log)
        for log, repeat in ((reference, 0), (candidate, 0), (again, 1), (bad, 0))
        if log is not None
    }
    if again is not None:  # it is the reference's second answer
        runs[reference.name, 1] = runs.pop((again.name, 1))
    base = runs[reference.name, 0]
    for log in (candidate, again, bad):
        if log is not None:
            _check_same(reference, log, base, _questions(log))
    for log in (reference, candidate, again, bad):
        if log is not None:
            _check_reported(log, _questions(log))
    unscored = {key for run in runs.values() for key, one in run.items() if one.value is None}
    _check_scored(unscored, len(base))
    evaluation = _evaluation(runs, unscored, reference, candidate, bad, margin, facts or {})
    verdict = judge(
        evaluation.outcomes("score"),
        candidate.name,
        evaluation.design,
        bad=bad.name if bad else None,
        reference=reference.name,
    )
    return evaluation, {candidate.name: (1, verdict)}


def _questions(log: Log) -> dict[Key, LoggedQuestion]:
    groups: dict[Key, list[Sample]] = defaultdict(list)
    for sample in log.samples:
        groups[sample.task, sample.question].append(sample)
    found = {}
    for key, samples in groups.items():
        if len({sample.prompt for sample in samples}) > 1:
            raise QualityError(
                f"{log.name} has question {key[1]} of {key[0]} with several prompts; give a log of "
                "one run"
            )
        values = [sample.value for sample in samples if sample.value is not None]
        found[key] = LoggedQuestion(samples[0], fmean(values) if values else None)
    return found


def _check_same(
    reference: Log,
    other: Log,
    base: Mapping[Key, LoggedQuestion],
    run: Mapping[Key, LoggedQuestion],
) -> None:
    if reference.kind != other.kind:
        raise QualityError(
            f"{reference.name} is a log of {reference.kind} and {other.name} one of {other.kind}, "
            "which ask in other words; compare runs of one harness"
        )
    tasks, others = ({task for task, _ in keys} for keys in (base, run))
    if tasks != others:
        raise QualityError(
            f"{reference.name} has the tasks {', '.join(sorted(tasks))} and {other.name} has "
            f"{', '.join(sorted(others))}; run the same tasks"
        )
    if lost := sorted(base.keys() ^ run.keys()):
        task, question = lost[0]
        raise QualityError(
            f"{len(lost):,} questions are in only one of {reference.name} and {other.name}, the "
            f"first is {question} of {task}; run both to the end, with the same limit and seed"
        )
    changed = [key for key, one in base.items() if one.sample.prompt != run[key].sample.prompt]
    if changed:
        task, question = changed[0]
        raise QualityError(
            f"{len(changed):,} of {len(base):,} questions have another prompt or another right "
            f"answer in {other.name} than in {reference.name}, the first is {question} of {task}; "
            "run both with the same chat template, few-shot examples and data"
        )
    if {one.sample.metric for one in base.values()} != {one.sample.metric for one in run.values()}:
        raise QualityError(f"{reference.name} and {other.name} have other metrics; say --metric")


def _check_reported(log: Log, run: Mapping[Key, LoggedQuestion]) -> None:
    """The mean of a task's questions must be what the harness printed of them."""
    values: dict[Cell, list[float]] = defaultdict(list)
    for (task, _), one in run.items():
        if one.value is not None:
            values[task, one.sample.length].append(one.value)
    for cell, said in log.reported.items():
        found = fmean(values[cell]) if cell in values else None
        if found is None or abs(found - said) > ROUNDED:
            mean = "nothing" if found is None else f"{found:.4f}"
            raise QualityError(
                f"{log.name}: the harness reports {said:.4f} for {cell[0]}, and its samples have a "
                f"mean of {mean}. Its number is no mean of these scores: choose another metric "
                "(--metric), or give the samples of the run that was reported"
            )


def _check_scored(unscored: set[Key], count: int) -> None:
    if len(unscored) > MOST_UNSCORED * count:
        raise QualityError(
            f"{len(unscored):,} of {count:,} questions have no score in one of the runs, more than "
            f"{MOST_UNSCORED:.0%}: they may be the hard ones. Run those again"
        )


def _evaluation(
    runs: Mapping[tuple[str, int], Mapping[Key, LoggedQuestion]],
    unscored: set[Key],
    reference: Log,
    candidate: Log,
    bad: Log | None,
    margin: float,
    facts: Mapping[str, Any],
) -> Evaluation:
    arms = [Arm(reference.name, "", Role.REFERENCE), Arm(candidate.name, "", Role.CANDIDATE)]
    if bad is not None:
        arms.append(Arm(bad.name, "", Role.BAD))
    planned, answers = {}, []
    for key, first in runs[reference.name, 0].items():
        sample = first.sample
        context = f"{sample.task} {sample.length} {sample.context}"
        planned[context] = Planned(
            context, sample.task, sample.length, 1, again=(reference.name, 1) in runs
        )
        answers += [
            Answer(
                arm,
                repeat,
                context,
                sample.question,
                sample.task,
                sample.length,
                0.0,
                None,
                score=run[key].value,
            )
            for (arm, repeat), run in runs.items()
            if key not in unscored
        ]
    left = {answer.context for answer in answers}
    metrics = sorted({one.sample.metric for one in runs[reference.name, 0].values()})
    return Evaluation(
        facts={"logs": reference.kind, "metric": ", ".join(metrics), **facts},
        design=Design(contexts=max(len(left), 1), margin=margin, looks=1),
        selects_all=NO_CONTROL,
        arms=tuple(arms),
        mode=Mode.GENERATE,
        pattern_verified=False,
        planned=tuple(planned.values()),
        answers=tuple(answers),
        missing=tuple(
            Missing(context, "", "no question of it has a score in every run")
            for context in planned
            if context not in left
        ),
        finished=True,
        notices=_notices(len(unscored), checked=bool(reference.reported and candidate.reported)),
    )


def _notices(unscored: int, *, checked: bool) -> tuple[str, ...]:
    said = [
        "The answers and their scores are another harness's: which pattern they were made with, "
        "and whether both runs had the same server, is not known here."
    ]
    if not checked:
        said.append(
            "The harness's own numbers do not lie beside its samples, so they were not compared."
        )
    if unscored:
        said.append(f"{unscored} questions have no score in one of the runs, and count in none.")
    return tuple(said)
