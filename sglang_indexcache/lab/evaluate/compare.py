"""Two runs of any harness, paired question by question, with our statistics.

Only runs of the same questions can be compared: other tasks, other samples, other prompts or other
right answers are refused. Scores are taken as they are; repeated askings of a question (epochs) are
averaged, which takes out noise and leaves one observation. Per-sample logs are read of

* lm-evaluation-harness: ``samples_<task>_<date>.jsonl`` of ``--log_samples``, after
  ``EvaluationTracker.save_results_samples`` and ``SampleResult`` of lm-eval 0.4.13. A row is one
  document under one filter, with its scores under the names listed in ``metrics``. RULER's tasks
  name their metrics by length, and give -1 at the lengths that the document does not have.
* plain, for any other harness: an object a line with the question's ``id`` and its ``score``, 0 to
  1. ``context`` names the text that several questions share; ``task`` and ``prompt`` are compared
  if they are there.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from sglang_indexcache.data.rows import read_rows
from sglang_indexcache.errors import DataError, QualityError
from sglang_indexcache.lab.evaluate.evaluation import Answer, Evaluation, Missing
from sglang_indexcache.lab.evaluate.plan import Arm, Planned, Role
from sglang_indexcache.stats.design import Design

Row = dict[str, Any]
LM_EVAL, PLAIN = "lm-eval", "plain"
FIELDS = {LM_EVAL: {"doc_hash", "metrics"}, PLAIN: {"id", "score"}}
"""What every row of a kind of log has."""
CLUSTERS = (
    *("context_id", "document_id", "document_set_id", "passage_id", "data_source_urls"),
    *("context", "document", "passage", "article"),
)
"""Fields that say, in the public data sets, which questions are asked of the same text."""
_NAME = re.compile(r"samples_(.+?)(?:_\d{4}-\d\d-\d\dT[\d.-]+)?$")
MOST_UNSCORED = 0.01
Key = tuple[str, str]
"""Task and question."""


@dataclass(frozen=True)
class Sample:
    """One question, asked once.

    Attributes:
        question: unique within the task.
        context: which questions share a text; the question itself where the log does not tell.
        prompt: digest of all that both runs must have in common: prompt and right answer.
        value: 0 to 1; None where the harness could not score the answer.
        length: tokens; 0 where the log does not tell.
    """

    task: str
    question: str
    context: str
    prompt: str
    metric: str
    value: float | None
    length: int = 0


@dataclass(frozen=True)
class Log:
    """One run of a harness, as it is called in the report; its kind is one of :data:`FIELDS`."""

    name: str
    kind: str
    samples: tuple[Sample, ...]


Questions = Mapping[Key, Sample]
"""The questions of one run, each once, its askings averaged."""
Runs = dict[tuple[str, int], Questions]
"""Runs by arm and repeat."""


def read_log(name: str, place: str, metric: str | None = None) -> Log:
    """Read a file, or all files of a run's folder; ``metric`` is only needed if it has several.

    Raises:
        QualityError: nothing there that is a log, or more than one choice; each with the fix.
    """
    path = Path(place)
    if not path.exists():
        raise QualityError(f"there is no log at {place}. Give a run's folder or file.")
    kind, files = _recognise(path)
    samples: list[Sample] = []
    for file in files:
        new_samples = list((_plain if kind == PLAIN else _lm_eval)(file, metric))
        # A folder often holds several runs, and their samples must not be mixed.
        if {sample.task for sample in new_samples} & {sample.task for sample in samples}:
            raise QualityError(
                f"{path} holds several runs ({files[0].name}, {files[-1].name}, ...): give the "
                "file or the folder of one"
            )
        samples += new_samples
    if not samples:
        raise QualityError(f"{place} has no sample")
    return Log(name, kind, tuple(samples))


def _recognise(path: Path) -> tuple[str, list[Path]]:
    """Return the kind of log that lies there, and its files."""
    files = [path]
    if path.is_dir():
        files = sorted(path.glob("*.jsonl")) or sorted(path.rglob("*.jsonl"))
    for kind, fields in FIELDS.items():
        if matching := [file for file in files if fields <= _first_row(file).keys()]:
            return kind, matching
    raise QualityError(
        f"{path} holds no per-sample log that is known. Let lm-eval write its samples "
        "(--log_samples), or write another harness's as .jsonl with an object of id and score a "
        "line, and give the file or its folder"
    )


def _first_row(path: Path) -> Row:
    """Return the first object of a file; empty if the file has none."""
    try:
        return next(_rows(path), {})
    except QualityError:
        return {}


def _rows(path: Path) -> Iterator[Row]:
    """Yield the objects of a JSON lines file; a QualityError names the line that is none."""
    try:
        for row in read_rows(path):
            if not isinstance(row.value, dict):
                raise QualityError(f"{row.where} is no sample")
            yield row.value
    except DataError as error:
        raise QualityError(
            f"{error} If the run was stopped in the middle, let it finish, or delete that line in "
            "both logs."
        ) from error


def _plain(path: Path, metric: str | None) -> Iterator[Sample]:
    """Yield the samples of one plain file; a score of null was not given."""
    metric_name = _pick(["score"], metric, path)
    for number, row in enumerate(_rows(path), 1):
        if not row.keys() >= FIELDS[PLAIN]:
            raise QualityError(f"sample {number} of {path} has no id or no score")
        question, context = str(row["id"]), row.get("context")
        yield Sample(
            str(row.get("task", "samples")),
            question,
            question if context is None else str(context),
            _digest(row.get("prompt")),
            metric_name,
            _share(row["score"], path),
        )


def _lm_eval(path: Path, metric: str | None) -> Iterator[Sample]:
    """Yield the samples of one task."""
    match = _NAME.match(path.stem)
    rows = list(_rows(path))
    metric_name = _pick(sorted({name for row in rows for name in _metrics(row)}), metric, path)
    for row in rows:
        if metric_name not in _metrics(row):
            continue  # under another filter
        length, name = _metrics(row)[metric_name]
        if name not in row:
            raise QualityError(
                f"{path} names the metric {name!r} and document {row['doc_id']} has none; run the "
                "harness again, or choose another metric (--metric)"
            )
        question = str(row["doc_id"])
        yield Sample(
            match[1] if match else path.stem,
            question,
            _text_of(row.get("doc") or {}, question),
            _digest(row["doc_hash"], row["prompt_hash"], row["target_hash"]),
            metric_name,
            _share(row[name], path),
            length,
        )


def _metrics(row: Row) -> dict[str, tuple[int, str]]:
    """Return metrics by name, with their filter: the length if it is named, and the field."""
    suffix = "" if row.get("filter", "none") == "none" else f",{row['filter']}"
    if row["metrics"] and all(name.isdigit() for name in row["metrics"]):
        lengths = [name for name in row["metrics"] if row.get(name) != -1]
        return {f"score{suffix}": (int(name), name) for name in lengths}
    return {f"{name}{suffix}": (0, name) for name in row["metrics"]}


def _text_of(fields: Mapping[str, Any], otherwise: str) -> str:
    """Identify the text that a question is about, by what the log keeps of its data set's row."""
    for name in CLUSTERS:
        value = fields.get(name)
        if value is not None and value != "":
            return _digest(name, value)
    return otherwise


def _digest(*parts: Any) -> str:
    """Return a digest that stands for a prompt without its length."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _pick(names: Sequence[str], metric: str | None, where: Path) -> str:
    """Choose the metric to compare: the one that was named, or the only one."""
    if metric is None and len(names) == 1:
        return names[0]
    if metric in names:
        return str(metric)
    listing = ", ".join(repr(name) for name in names) or "no metric"
    if metric is None:
        raise QualityError(f"{where} has {listing}: say which to compare (--metric)")
    raise QualityError(f"{where} has no metric {metric!r}, but {listing}")


def _share(value: Any, where: Path) -> float | None:
    """Return a score as a number from 0 to 1, as our bounds need; None for what is not scored."""
    if value is None or isinstance(value, str) or value != value:
        return None
    if not isinstance(value, int | float):
        raise QualityError(
            f"{where} has a score that is no number ({str(value)[:40]}), such as a metric of whole "
            "runs leaves with each sample. Choose another metric (--metric)"
        )
    if not 0 <= value <= 1:
        raise QualityError(
            f"{where} has a score of {value:g}; only scores from 0 to 1 can be compared. Choose "
            "another metric (--metric)"
        )
    return float(value)


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
