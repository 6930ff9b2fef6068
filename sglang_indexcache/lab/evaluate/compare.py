"""Two runs of any harness, paired question by question, with our statistics.

Only runs of the same questions can be compared: other tasks, other samples, other prompts or other
right answers are refused. Scores are taken as they are; repeated askings of a question (epochs) are
averaged, which takes out noise and leaves one observation. What a harness writes is read by
:mod:`~sglang_indexcache.lab.evaluate.logs`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from statistics import fmean
from typing import Any

from sglang_indexcache.errors import QualityError
from sglang_indexcache.lab.evaluate.evaluation import Answer, Evaluation, Missing
from sglang_indexcache.lab.evaluate.evaluation_plan import Arm, Planned, Role
from sglang_indexcache.lab.evaluate.logs import Log, Sample
from sglang_indexcache.lab.stats.design import Design

MOST_UNSCORED = 0.01
Key = tuple[str, str]
"""Task and question."""
Questions = Mapping[Key, Sample]
"""The questions of one run, each once, its askings averaged."""
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
    """Pair the runs of the reference and of a pattern, as one evaluation.

    ``again`` is a second run of the reference, ``bad`` one with a pattern that is known to be bad.

    Raises:
        QualityError: the runs are not of the same questions, or too many have no score.
    """
    runs = _runs(reference, candidate, again, bad)
    base = runs[reference.name, 0]
    arms = [Arm(reference.name, "", Role.REFERENCE), Arm(candidate.name, "", Role.CANDIDATE)]
    if bad:
        arms.append(Arm(bad.name, "", Role.BAD))
    unscored = _unscored(runs, len(base))
    planned = {
        (name := _context(sample)): Planned(name, sample.task, sample.length, 1, again is not None)
        for sample in base.values()
    }
    answers = tuple(_answers(runs, base, unscored))
    answered = {answer.context for answer in answers}
    without_answer = (
        Missing(context, "", "no question of it has a score in every run")
        for context in planned
        if context not in answered
    )
    candidates = runs[candidate.name, 0]
    metrics = ", ".join(sorted({sample.metric for sample in base.values()}))
    return Evaluation(
        {"logs": reference.kind, "metric": metrics, **(facts or {})},
        design=Design(contexts=max(len(answered), 1), margin=margin, looks=1),
        selects_all=None,
        arms=tuple(arms),
        planned=tuple(planned.values()),
        answers=answers,
        missing=(*without_answer, *_missing_questions(base, candidates, unscored, answered)),
        finished=True,
        notices=_notices(base.values(), len(unscored)),
    )


def _runs(reference: Log, candidate: Log, again: Log | None, bad: Log | None) -> Runs:
    """Return the samples of each run by arm and repeat; all are of the reference's questions.

    Raises:
        QualityError: another run asked others, or two have one name.
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


def _unscored(runs: Runs, questions: int) -> set[Key]:
    """Return the questions that lack a score in some run.

    Raises:
        QualityError: too many; they may be the hard ones.
    """
    unscored = {key for run in runs.values() for key, sample in run.items() if sample.value is None}
    if len(unscored) > MOST_UNSCORED * questions:
        raise QualityError(
            f"{len(unscored):,} of {questions:,} questions have no score in one of the runs, more "
            f"than {MOST_UNSCORED:.0%}: they may be the hard ones. Run those again"
        )
    return unscored


def _answers(runs: Runs, base: Questions, unscored: Collection[Key]) -> Iterator[Answer]:
    """Yield every run's answers to the questions that all runs scored, run by run."""
    for (arm, repeat), run in runs.items():
        for key, sample in run.items():
            if key not in unscored and sample.value is not None:
                task, question = key
                place = (arm, repeat, _context(base[key]), question, task, base[key].length, None)
                yield Answer(*place, right=sample.value)


def _missing_questions(
    base: Questions, candidate: Questions, unscored: Iterable[Key], answered: Collection[str]
) -> Iterator[Missing]:
    """Yield the questions of contexts with an answer that have no score in one of the two runs.

    Those that a second run or the bad pattern lacks are left out, but nobody counts them as lost.
    """
    for key in sorted(unscored):
        context = _context(base[key])
        if context in answered and None in (base[key].value, candidate[key].value):
            yield Missing(context, "", "no score in every run", key[1])


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
        values = [sample.value for sample in samples if sample.value is not None]
        questions[key] = replace(samples[0], value=fmean(values) if values else None)
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


def _notices(samples: Iterable[Sample], unscored: int) -> tuple[str, ...]:
    notices = [
        "The answers and their scores are another harness's: which pattern they were made with, "
        "and whether both runs had the same server, is not known here."
    ]
    if all(sample.context == sample.question for sample in samples):
        notices.append(
            "Each question counts as a text of its own, because the log names none: if several are "
            "about one text, they fail together, and the interval is too narrow."
        )
    if unscored:
        notices.append(
            f"{unscored} questions have no score in one of the runs: they count in no mean, and as "
            "lost where no loss is claimed."
        )
    return tuple(notices)
