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
from sglang_indexcache.lab.evaluate.evaluation import Evaluation
from sglang_indexcache.lab.evaluate.evaluation_plan import Arm, Planned, Role
from sglang_indexcache.lab.evaluate.logs import Log, Sample
from sglang_indexcache.lab.stats.design import Design
from sglang_indexcache.lab.stats.pairs import Answer

Questions = Mapping[tuple[str, str], Sample]
"""Questions of one run by task and name, each once, with repeated answers averaged."""


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
        QualityError: the runs have different questions, or two of them the same name.
    """
    logs = [(reference, Role.REFERENCE), (candidate, Role.CANDIDATE)]
    logs += [(bad, Role.BAD)] if bad else []
    arms = tuple(Arm(log.name, "", role) for log, role in logs)
    names = [arm.name for arm in arms]
    for name in names:
        if names.count(name) > 1:
            raise QualityError(
                f"two of the runs are called {name}, so the report could not tell them apart. Give "
                "each a name of its own: NAME=PATH."
            )
    base = _questions(reference)
    answers = [*_answers(reference.name, 0, base, base)]
    if again:  # the reference's second answer
        answers += _answers(reference.name, 1, base, _same_questions(reference, again, base))
    for log, _ in logs[1:]:
        answers += _answers(log.name, 0, base, _same_questions(reference, log, base))
    planned = {
        (name := _context(sample)): Planned(name, sample.task, sample.length, 1, again is not None)
        for sample in base.values()
    }
    metrics = ", ".join(sorted({sample.metric for sample in base.values()}))
    return Evaluation(
        {"logs": reference.kind, "metric": metrics, **(facts or {})},
        design=Design(contexts=len(planned), margin=margin, looks=1),
        selects_all=None,
        arms=arms,
        planned=tuple(planned.values()),
        answers=tuple(answers),
        finished=True,
        notices=_notices(base.values()),
    )


def _answers(arm: str, repeat: int, base: Questions, run: Questions) -> Iterator[Answer]:
    """Yield the answers of a run, at the places that the reference's run gives them."""
    for key, sample in run.items():
        task, question = key
        place = (arm, repeat, _context(base[key]), question, task, base[key].length, None)
        yield Answer(*place, right=sample.value)


def _context(sample: Sample) -> str:
    return f"{sample.task} {sample.length} {sample.context}"


def _questions(log: Log) -> Questions:
    groups: dict[tuple[str, str], list[Sample]] = defaultdict(list)
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


def _same_questions(reference: Log, log: Log, base: Questions) -> Questions:
    """Return another run's questions, and refuse any but the reference's."""
    run = _questions(log)
    if reference.kind != log.kind:
        raise QualityError(
            f"{reference.name} is a log of {reference.kind} and {log.name} one of {log.kind}, "
            "which ask in other words; compare runs of one harness"
        )
    tasks, other_tasks = ({task for task, _ in keys} for keys in (base, run))
    if tasks != other_tasks:
        raise QualityError(
            f"{reference.name} has the tasks {', '.join(sorted(tasks))} and {log.name} has "
            f"{', '.join(sorted(other_tasks))}; run the same tasks"
        )
    if unpaired := sorted(base.keys() ^ run.keys()):
        task, question = unpaired[0]
        raise QualityError(
            f"{len(unpaired):,} questions are in only one of {reference.name} and {log.name}, "
            f"the first is {question} of {task}; run both to the end, with the same limit and seed"
        )
    changed = [key for key, sample in base.items() if sample.prompt != run[key].prompt]
    if changed:
        task, question = changed[0]
        raise QualityError(
            f"{len(changed):,} of {len(base):,} questions have another prompt or another right "
            f"answer in {log.name} than in {reference.name}, the first is {question} of {task}; "
            "run both with the same chat template, few-shot examples and data"
        )
    if {sample.metric for sample in base.values()} != {sample.metric for sample in run.values()}:
        raise QualityError(f"{reference.name} and {log.name} have other metrics; say --metric")
    return run


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
