"""Comparison of two runs of any harness, paired question by question, with our statistics.

Only runs of the same questions can be compared; runs that differ in tasks, samples, prompts or
right answers are refused. Scores are used unchanged. Repeated answers to a question (epochs) are
averaged, which reduces noise and leaves one observation. Logs are read by
:mod:`~sglang_indexcache.lab.evaluate.logs`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from statistics import fmean
from typing import Any

from sglang_indexcache.errors import QualityError
from sglang_indexcache.lab.evaluate.evaluation import Answer, Evaluation
from sglang_indexcache.lab.evaluate.evaluation_plan import Arm, Planned, Role
from sglang_indexcache.lab.evaluate.logs import Log, Sample
from sglang_indexcache.lab.stats.design import Design

Key = tuple[str, str]
"""Task and question."""
Questions = Mapping[Key, Sample]
"""Questions of one run, each once, with repeated answers averaged."""
Runs = dict[tuple[str, int], Questions]
"""Runs by arm and repeat."""


def compare_logs(
    reference: Log,
    candidate: Log,
    *,
    margin: float = 0.01,
    again: Log | None = None,
    bad: Log | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Evaluation:
    """Pair the runs of the reference and of a pattern into one evaluation.

    ``again`` is a second run of the reference, ``bad`` a run with a pattern that is known to be
    bad.

    Raises:
        QualityError: the runs have different questions.
    """
    runs = _runs(reference, candidate, again, bad)
    base = runs[reference.name, 0]
    arms = [Arm(reference.name, "", Role.REFERENCE), Arm(candidate.name, "", Role.CANDIDATE)]
    if bad:
        arms.append(Arm(bad.name, "", Role.BAD))
    planned = {
        (name := _context(sample)): Planned(name, sample.task, sample.length, 1, again is not None)
        for sample in base.values()
    }
    metrics = ", ".join(sorted({sample.metric for sample in base.values()}))
    return Evaluation(
        {"logs": reference.kind, "metric": metrics, **(facts or {})},
        design=Design(contexts=len(planned), margin=margin, looks=1),
        selects_all=None,
        arms=tuple(arms),
        planned=tuple(planned.values()),
        answers=tuple(_answers(runs, base)),
        finished=True,
        notices=_notices(base.values()),
    )


def _runs(reference: Log, candidate: Log, again: Log | None, bad: Log | None) -> Runs:
    """Return the samples of each run by arm and repeat, all for the reference's questions.

    Raises:
        QualityError: a run asked other questions, or two runs have the same name.
    """
    names = [log.name for log in (reference, candidate, bad) if log]
    for name in names:
        if names.count(name) > 1:
            raise QualityError(
                f"two of the runs are called {name}, so the report could not tell them apart. Give "
                "each a name of its own: NAME=PATH."
            )
    base = _questions(reference)
    runs: Runs = {(reference.name, 0): base}
    further = [(candidate, candidate.name, 0)]
    if again:  # the reference's second answer
        further.append((again, reference.name, 1))
    if bad:
        further.append((bad, bad.name, 0))
    for log, arm, repeat in further:
        runs[arm, repeat] = _questions(log)
        _check_same(reference, log, base, runs[arm, repeat])
    return runs


def _answers(runs: Runs, base: Questions) -> Iterator[Answer]:
    """Yield the answers of every run, one run after the other."""
    for (arm, repeat), run in runs.items():
        for key, sample in run.items():
            task, question = key
            place = (arm, repeat, _context(base[key]), question, task, base[key].length, None)
            yield Answer(*place, right=sample.value)


def _context(sample: Sample) -> str:
    return f"{sample.task} {sample.length} {sample.context}"


def _questions(log: Log) -> dict[Key, Sample]:
    groups: dict[Key, list[Sample]] = defaultdict(list)
    for sample in log.samples:
        groups[sample.task, sample.question].append(sample)
    questions = {}
    for key, samples in groups.items():
        if len({sample.prompt for sample in samples}) > 1:
            raise QualityError(
                f"{log.name} has question {key[1]} of {key[0]} with several prompts; give a log of "
                "one run"
            )
        questions[key] = replace(samples[0], value=fmean(sample.value for sample in samples))
    return questions


def _check_same(reference: Log, other: Log, base: Questions, run: Questions) -> None:
    if reference.kind != other.kind:
        raise QualityError(
            f"{reference.name} is a log of {reference.kind} and {other.name} one of {other.kind}, "
            "which ask in other words; compare runs of one harness"
        )
    tasks, other_tasks = ({task for task, _ in keys} for keys in (base, run))
    if tasks != other_tasks:
        raise QualityError(
            f"{reference.name} has the tasks {', '.join(sorted(tasks))} and {other.name} has "
            f"{', '.join(sorted(other_tasks))}; run the same tasks"
        )
    if unpaired := sorted(base.keys() ^ run.keys()):
        task, question = unpaired[0]
        raise QualityError(
            f"{len(unpaired):,} questions are in only one of {reference.name} and {other.name}, "
            f"the first is {question} of {task}; run both to the end, with the same limit and seed"
        )
    changed = [key for key, sample in base.items() if sample.prompt != run[key].prompt]
    if changed:
        task, question = changed[0]
        raise QualityError(
            f"{len(changed):,} of {len(base):,} questions have another prompt or another right "
            f"answer in {other.name} than in {reference.name}, the first is {question} of {task}; "
            "run both with the same chat template, few-shot examples and data"
        )
    if {sample.metric for sample in base.values()} != {sample.metric for sample in run.values()}:
        raise QualityError(f"{reference.name} and {other.name} have other metrics; say --metric")


def _notices(samples: Iterable[Sample]) -> tuple[str, ...]:
    notices = [
        "The answers and their scores are another harness's: which pattern they were made with, "
        "and whether both runs had the same server, is not known here."
    ]
    if all(sample.context == sample.question for sample in samples):
        notices.append(
            "Each question counts as a text of its own, because the log names none: if several are "
            "about one text, they fail together, and the interval is too narrow."
        )
    return tuple(notices)
