"""Reading of other harnesses' per-sample logs, each in its own form.

* lm-evaluation-harness: ``samples_<task>_<date>.jsonl`` of ``--log_samples``, after
  ``EvaluationTracker.save_results_samples`` and ``SampleResult`` of lm-eval 0.4.13. A row is one
  document under one filter, with its scores under the names listed in ``metrics``. RULER's tasks
  name their metrics by length, and give -1 at lengths that the document does not have.
* plain, for any other harness: one object per line with the question's ``id`` and its ``score``, 0
  to 1. ``context`` names a text that several questions share; ``task`` and ``prompt`` are compared
  if they are present.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_indexcache.errors import DataError, QualityError
from sglang_indexcache.lab.data.rows import read_rows

Row = dict[str, Any]
Reader = Callable[[Path, str | None], Iterator["Sample"]]
CLUSTERS = (
    *("context_id", "document_id", "document_set_id", "passage_id", "data_source_urls"),
    *("context", "document", "passage", "article"),
)
"""Fields in public data sets that show which questions are about the same text."""
_OLD_LM_EVAL = {"doc_id", "filtered_resps"}
_NAME = re.compile(r"samples_(.+?)(?:_\d{4}-\d\d-\d\dT[\d.-]+)?$")
_WORDS = {"true": 1.0, "false": 0.0}
"""Scores that a table writes as words."""


@dataclass(frozen=True)
class Sample:
    """One question, asked once.

    Attributes:
        question: unique within the task.
        context: name of the text that questions share; the question itself if the log does not
            tell.
        prompt: digest of the prompt and the right answer, which both runs must have in common.
        value: score, 0 to 1.
        length: number of tokens; 0 if the log does not tell.
    """

    task: str
    question: str
    context: str
    prompt: str
    metric: str
    value: float
    length: int = 0


@dataclass(frozen=True)
class Log:
    """One run of a harness, with its name in the report; its kind is one of :data:`KINDS`."""

    name: str
    kind: str
    samples: tuple[Sample, ...]


def read_log(name: str, place: str, metric: str | None = None) -> Log:
    """Read a file, or all files of a run's folder; ``metric`` is needed only if there are several.

    Raises:
        QualityError: there is no log, or more than one choice; has the fix.
    """
    path = Path(place)
    if not path.exists():
        raise QualityError(f"there is no log at {place}. Give a run's folder or file.")
    kind, files = _recognise(path)
    samples: list[Sample] = []
    for file in files:
        new_samples = list(KINDS[kind].read(file, metric))
        # A folder often holds several runs, and their samples must not be mixed.
        if {sample.task for sample in new_samples} & {sample.task for sample in samples}:
            raise QualityError(
                f"{path} holds several runs ({files[0].name}, {files[-1].name}, ...): give the "
                "file or the folder of one"
            )
        samples += new_samples
    return Log(name, kind, tuple(samples))


def _recognise(path: Path) -> tuple[str, list[Path]]:
    """Return the kind of log at a path, and its files.

    Raises:
        QualityError: no file is a known log; says what is wrong with a file.
    """
    files = [path]
    if path.is_dir():
        files = sorted(path.glob("*.jsonl")) or sorted(path.rglob("*.jsonl"))
    first_rows: dict[Path, Row] = {}
    faults = []
    for file in files:
        try:
            first_rows[file] = next(_rows(file), {})
        except QualityError as error:
            faults.append(error)
    for name, kind in KINDS.items():
        if matching := [file for file, row in first_rows.items() if kind.fields <= row.keys()]:
            return name, matching
    if faults:
        raise faults[0]
    if any(row.keys() >= _OLD_LM_EVAL for row in first_rows.values()):
        raise QualityError(
            f"{path} is a log of an lm-eval before 0.4.7, which does not say which of its fields "
            "are scores, and under which filter. Run the harness again with 0.4.7 or later"
        )
    raise QualityError(
        f"{path} holds no per-sample log that is known. Let lm-eval write its samples "
        "(--log_samples), or write another harness's as .jsonl with an object of id and score a "
        "line, and give the file or its folder"
    )


def _rows(path: Path, kind: str = "") -> Iterator[Row]:
    """Yield the objects of a file of rows.

    Raises:
        QualityError: names the row that is no object, or lacks a field that every row of ``kind``
            has.
    """
    fields = KINDS[kind].fields if kind else frozenset()
    try:
        for row in read_rows(path):
            if not isinstance(row.value, dict):
                raise QualityError(f"{row.where} is no sample")
            if missing := sorted(fields - row.value.keys()):
                raise QualityError(f"{row.where} has no {' and no '.join(missing)}")
            yield row.value
    except DataError as error:
        raise QualityError(
            f"{error} If the run was stopped in the middle, let it finish, or delete that line in "
            "both logs."
        ) from error


def _plain(path: Path, metric: str | None) -> Iterator[Sample]:
    """Yield the samples of one plain file."""
    metric_name = _pick(["score"], metric, path)
    for row in _rows(path, PLAIN):
        question, context = str(row["id"]), row.get("context")
        yield Sample(
            str(row.get("task", "samples")),
            question,
            question if context is None else str(context),
            _digest(row.get("prompt")),
            metric_name,
            _share(row["score"], path, question),
        )


def _lm_eval(path: Path, metric: str | None) -> Iterator[Sample]:
    """Yield the samples of one task."""
    match = _NAME.match(path.stem)
    rows = list(_rows(path, LM_EVAL))
    metric_name = _pick(sorted({name for row in rows for name in _metrics(row)}), metric, path)
    for row in rows:
        if metric_name not in _metrics(row):
            continue  # this row has another filter
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
            _share(row[name], path, question),
            length,
        )


def _metrics(row: Row) -> dict[str, tuple[int, str]]:
    """Return metrics by name (with the filter): the length, if the name has one, and the field."""
    suffix = "" if row.get("filter", "none") == "none" else f",{row['filter']}"
    if row["metrics"] and all(name.isdigit() for name in row["metrics"]):
        lengths = [name for name in row["metrics"] if row.get(name) != -1]
        return {f"score{suffix}": (int(name), name) for name in lengths}
    return {f"{name}{suffix}": (0, name) for name in row["metrics"]}


def _text_of(fields: Mapping[str, Any], otherwise: str) -> str:
    """Identify a question's text by the fields of its data set's row that the log keeps."""
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
    """Choose the metric to compare: the named one, or the only one."""
    if metric is None and len(names) == 1:
        return names[0]
    if metric in names:
        return str(metric)
    listing = ", ".join(repr(name) for name in names) or "no metric"
    if metric is None:
        raise QualityError(f"{where} has {listing}: say which to compare (--metric)")
    raise QualityError(f"{where} has no metric {metric!r}, but {listing}")


def _share(value: Any, where: Path, question: str) -> float:
    """Return a score as a number from 0 to 1, which our bounds need."""
    if isinstance(value, str):
        value = _number(value)
    if value is None or value != value:
        raise QualityError(
            f"{where} has no score for question {question}, which may be a hard one. Run it again, "
            "leave it out of all logs, or choose another metric (--metric)"
        )
    if not isinstance(value, int | float):
        raise QualityError(
            f"{where} has a score that is no number ({str(value)[:40]}), such as a metric of whole "
            "runs leaves with each sample. Choose another metric (--metric)"
        )
    if not 0 <= value <= 1:
        per_cent = "If they are per cent, divide by 100 in all logs; else choose"
        raise QualityError(
            f"{where} has a score of {value:g}; only scores from 0 to 1 can be compared. "
            f"{per_cent if 0 < value <= 100 else 'Choose'} another metric (--metric)"
        )
    return float(value)


def _number(text: str) -> float | None:
    """Return the number that a text in a table stands for; None if it is not a number."""
    try:
        return float(text)
    except ValueError:
        return _WORDS.get(text.strip().lower())


@dataclass(frozen=True)
class LogForm:
    """Form of a kind of log: the fields of every row, and the function that reads a file."""

    fields: frozenset[str]
    read: Reader


LM_EVAL, PLAIN = "lm-eval", "plain"
KINDS = {
    LM_EVAL: LogForm(
        frozenset({"doc_id", "doc_hash", "prompt_hash", "target_hash", "metrics"}), _lm_eval
    ),
    PLAIN: LogForm(frozenset({"id", "score"}), _plain),
}
