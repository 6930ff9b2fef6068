"""Per-sample logs of other harnesses, whose scores are taken as they are.

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_indexcache.data.rows import read_rows
from sglang_indexcache.errors import DataError, QualityError
from sglang_indexcache.stats.pairs import Cell

Row = dict[str, Any]
LM_EVAL, PLAIN = "lm-eval", "plain"
FIELDS = {LM_EVAL: {"doc_hash", "metrics"}, PLAIN: {"id", "score"}}
"""What every row of a kind of log has."""
CLUSTERS = (
    "context_id",
    "document_id",
    "document_set_id",
    "passage_id",
    "data_source_urls",
    "context",
    "document",
    "passage",
    "article",
)
"""Fields that say, in the public data sets, which questions are asked of the same text."""
_NAME = re.compile(r"samples_(.+?)(?:_\d{4}-\d\d-\d\dT[\d.-]+)?$")


@dataclass(frozen=True)
class Sample:
    """One question, asked once.

    Attributes:
        task: what is asked.
        question: unique within the task.
        context: which questions share a text; the question itself where the log does not tell.
        prompt: digest of all that both runs must have in common: prompt and right answer.
        metric: what the value is.
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
    """One run of a harness.

    Attributes:
        name: how the run is called in the report.
        kind: of :data:`FIELDS`.
        samples: in the order of the log.
        reported: what the harness printed, by task and length; empty where it does not tell.
    """

    name: str
    kind: str
    samples: tuple[Sample, ...]
    reported: Mapping[Cell, float] = field(default_factory=dict)


def read_log(name: str, place: str, metric: str | None = None) -> Log:
    """Read a file, or all files of a run's folder.

    Args:
        name: how the run is called in the report.
        metric: which score to compare; may be left out if there is only one.

    Raises:
        QualityError: nothing there that is a log, or more than one choice; each with the fix.
    """
    path = Path(place)
    if not path.exists():
        raise QualityError(f"there is no log at {place}. Give a run's folder or file.")
    kind, files = _recognise(path)
    samples: list[Sample] = []
    reported: dict[Cell, float] = {}
    for file in files:
        found = list((_plain if kind == PLAIN else _lm_eval)(file, metric))
        # A folder often holds several runs, and their samples must not be mixed.
        if {one.task for one in found} & {one.task for one in samples}:
            raise QualityError(
                f"{path} holds several runs ({files[0].name}, {files[-1].name}, ...): give the "
                "file or the folder of one"
            )
        samples += found
        if kind == LM_EVAL and found:
            reported |= _printed(file, found[0].task, found[0].metric)
    if not samples:
        raise QualityError(f"{place} has no sample")
    return Log(name, kind, tuple(samples), reported)


def _recognise(path: Path) -> tuple[str, list[Path]]:
    """The kind of log that lies there, and its files."""
    files = [path]
    if path.is_dir():
        files = sorted(path.glob("*.jsonl")) or sorted(path.rglob("*.jsonl"))
    for kind, fields in FIELDS.items():
        if found := [file for file in files if fields <= _first_row(file).keys()]:
            return kind, found
    raise QualityError(
        f"{path} holds no per-sample log that is known. Let lm-eval write its samples "
        "(--log_samples), or write another harness's as .jsonl with an object of id and score a "
        "line, and give the file or its folder"
    )


def _first_row(path: Path) -> Row:
    """Empty if the file has none."""
    try:
        return next(_rows(path), {})
    except QualityError:
        return {}


def _rows(path: Path) -> Iterator[Row]:
    """The objects of a JSON lines file.

    Raises:
        QualityError: naming the line that is none.
    """
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
    """The samples of one plain file; a score of null was not given."""
    chosen = _pick(["score"], metric, path)
    for number, row in enumerate(_rows(path), 1):
        if not row.keys() >= FIELDS[PLAIN]:
            raise QualityError(f"sample {number} of {path} has no id or no score")
        question, context = str(row["id"]), row.get("context")
        yield Sample(
            str(row.get("task", "samples")),
            question,
            question if context is None else str(context),
            _digest(row.get("prompt")),
            chosen,
            _share(row["score"], path),
        )


def _lm_eval(path: Path, metric: str | None) -> Iterator[Sample]:
    """The samples of one task."""
    named = _NAME.match(path.stem)
    rows = list(_rows(path))
    chosen = _pick(sorted({name for row in rows for name in _metrics(row)}), metric, path)
    for row in rows:
        if chosen not in _metrics(row):
            continue  # under another filter
        length, name = _metrics(row)[chosen]
        if name not in row:
            raise QualityError(
                f"{path} names the metric {name!r} and document {row['doc_id']} has none; run the "
                "harness again, or choose another metric (--metric)"
            )
        question = str(row["doc_id"])
        yield Sample(
            named[1] if named else path.stem,
            question,
            _text_of(row.get("doc") or {}, question),
            _digest(row["doc_hash"], row["prompt_hash"], row["target_hash"]),
            chosen,
            _share(row[name], path),
            length,
        )


def _metrics(row: Row) -> dict[str, tuple[int, str]]:
    """By name, with the filter where there is one: the length if it is named, and the field."""
    suffix = "" if row.get("filter", "none") == "none" else f",{row['filter']}"
    if row["metrics"] and all(name.isdigit() for name in row["metrics"]):
        asked = [name for name in row["metrics"] if row.get(name) != -1]
        return {f"score{suffix}": (int(name), name) for name in asked}
    return {f"{name}{suffix}": (0, name) for name in row["metrics"]}


def _printed(path: Path, task: str, metric: str) -> dict[Cell, float]:
    """What ``results_<date>.json`` beside lm-eval's samples says of them, if it is there."""
    place = path.with_name(f"results_{path.stem.rpartition('_')[2]}.json")
    if not place.exists():
        return {}
    found = json.loads(place.read_text(encoding="utf-8"))["results"].get(task, {})
    name, _, chosen = metric.partition(",")
    if name == "score":  # RULER's metrics are lengths; -1 is one that no document has
        every = {key.partition(",")[0]: value for key, value in found.items()}
        return {(task, int(key)): every[key] for key in every if key.isdigit() and every[key] != -1}
    value = found.get(f"{name},{chosen or 'none'}")
    return {} if value is None else {(task, 0): value}


def _text_of(fields: Mapping[str, Any], otherwise: str) -> str:
    """Which text a question is about, from what the log keeps of its data set's row."""
    for name in CLUSTERS:
        value = fields.get(name)
        if value is not None and value != "":
            return _digest(name, value)
    return otherwise


def _digest(*parts: Any) -> str:
    """What stands for a prompt without its length."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _pick(names: Sequence[str], wanted: str | None, where: Path) -> str:
    """The metric to compare.

    Raises:
        QualityError: several and none of them chosen, or none of that name.
    """
    if wanted is None and len(names) == 1:
        return names[0]
    if wanted in names:
        return str(wanted)
    said = ", ".join(repr(name) for name in names) or "no metric"
    if wanted is None:
        raise QualityError(f"{where} has {said}: say which to compare (--metric)")
    raise QualityError(f"{where} has no metric {wanted!r}, but {said}")


def _share(value: Any, where: Path) -> float | None:
    """A score as a number from 0 to 1; None for what is not scored.

    Raises:
        QualityError: a number that is no share, whose differences no bound of ours holds for.
    """
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
