"""Two runs of any harness, paired question by question, with our statistics.

Only runs of the same questions can be compared: other tasks, other samples, other prompts or other
right answers are refused. Repeated askings of a question (epochs) are averaged, which takes out
noise and leaves one observation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean
from typing import Any

from sglang_indexcache.errors import QualityError
from sglang_indexcache.evaluate.evaluation import Answer, Arm, Evaluation, Missing, Role
from sglang_indexcache.evaluate.logs import Log, Sample
from sglang_indexcache.evaluate.plan import Planned
from sglang_indexcache.stats.pairs import Cell
from sglang_indexcache.stats.power import Design

MOST_UNSCORED = 0.01
ROUNDED = 5e-4
"""How far a harness may round what it prints."""
Key = tuple[str, str]
"""Task and question."""
Questions = Mapping[Key, Sample]
"""Of one run, each once, its askings averaged."""


def compare_logs(
    reference: Log,
    candidate: Log,
    *,
    margin: float = 0.01,
    again: Log | None = None,
    bad: Log | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Evaluation:
    """Pair the runs, as one evaluation.

    Args:
        reference: the run without sharing.
        candidate: the run with the pattern.
        margin: the loss that still counts as none; 0.01 is one point.
        again: a second run of the reference, for the engine's own noise.
        bad: a run with a pattern that is known to be bad.

    Raises:
        QualityError: the runs are not of the same questions, or too many have no score.
    """
    base = _questions(reference)
    runs = {(reference.name, 0): base}
    _check_reported(reference, base)
    arms = [Arm(reference.name, "", Role.REFERENCE), Arm(candidate.name, "", Role.CANDIDATE)]
    others = [(candidate, candidate.name, 0)]
    if again:  # the reference's second answer
        others.append((again, reference.name, 1))
    if bad:
        others.append((bad, bad.name, 0))
        arms.append(Arm(bad.name, "", Role.BAD))
    for log, arm, repeat in others:
        runs[arm, repeat] = _questions(log)
        _check_same(reference, log, base, runs[arm, repeat])
        _check_reported(log, runs[arm, repeat])
    unscored = {key for run in runs.values() for key, one in run.items() if one.value is None}
    if len(unscored) > MOST_UNSCORED * len(base):
        raise QualityError(
            f"{len(unscored):,} of {len(base):,} questions have no score in one of the runs, more "
            f"than {MOST_UNSCORED:.0%}: they may be the hard ones. Run those again"
        )
    planned = {
        _context(one): Planned(_context(one), one.task, one.length, 1, again is not None)
        for one in base.values()
    }
    answers = tuple(
        Answer(
            *(arm, repeat, _context(base[key]), key[1], key[0], base[key].length, None),
            right=one.value,
        )
        for (arm, repeat), run in runs.items()
        for key, one in run.items()
        if key not in unscored and one.value is not None
    )
    left = {answer.context for answer in answers}
    checked = bool(reference.reported and candidate.reported)
    metrics = ", ".join(sorted({one.metric for one in base.values()}))
    return Evaluation(
        {"logs": reference.kind, "metric": metrics, **(facts or {})},
        design=Design(contexts=max(len(left), 1), margin=margin, looks=1),
        selects_all=None,
        arms=tuple(arms),
        planned=tuple(planned.values()),
        answers=answers,
        missing=tuple(
            Missing(context, "", "no question of it has a score in every run")
            for context in planned
            if context not in left
        ),
        finished=True,
        notices=_notices(len(unscored), checked=checked),
    )


def _context(sample: Sample) -> str:
    return f"{sample.task} {sample.length} {sample.context}"


def _questions(log: Log) -> dict[Key, Sample]:
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
        found[key] = replace(samples[0], value=fmean(values) if values else None)
    return found


def _check_same(reference: Log, other: Log, base: Questions, run: Questions) -> None:
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
    changed = [key for key, one in base.items() if one.prompt != run[key].prompt]
    if changed:
        task, question = changed[0]
        raise QualityError(
            f"{len(changed):,} of {len(base):,} questions have another prompt or another right "
            f"answer in {other.name} than in {reference.name}, the first is {question} of {task}; "
            "run both with the same chat template, few-shot examples and data"
        )
    if {one.metric for one in base.values()} != {one.metric for one in run.values()}:
        raise QualityError(f"{reference.name} and {other.name} have other metrics; say --metric")


def _check_reported(log: Log, run: Questions) -> None:
    """The mean of a task's questions must be what the harness printed of them."""
    values: dict[Cell, list[float]] = defaultdict(list)
    for one in run.values():
        if one.value is not None:
            values[one.task, one.length].append(one.value)
    for cell, said in log.reported.items():
        found = fmean(values[cell]) if cell in values else None
        if found is None or abs(found - said) > ROUNDED:
            mean = "nothing" if found is None else f"{found:.4f}"
            raise QualityError(
                f"{log.name}: the harness reports {said:.4f} for {cell[0]}, and its samples have a "
                f"mean of {mean}. Its number is no mean of these scores: choose another metric "
                "(--metric), or give the samples of the run that was reported"
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
