"""What every format of log is read into, what their readers share, and the plain format.

The plain one is for any other harness: a JSON object a line with the question's ``id`` and its
``score``, 0 to 1. ``context`` names the text that several questions share, ``task`` and ``prompt``
are compared if they are there: runs with other prompts are refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_indexcache.data.rows import read_rows
from sglang_indexcache.errors import DataError, QualityError
from sglang_indexcache.stats.pairs import Cell

Row = dict[str, Any]
Printed = Mapping[Cell, float]
"""What a harness itself printed, by task and length; empty where it does not tell."""
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


def json_lines(path: Path) -> Iterator[Row]:
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


def first_row(path: Path) -> Row:
    """The first object of a JSON lines file; empty if it has none."""
    return next(json_lines(path), {})


def digest(*parts: Any) -> str:
    """What stands for a prompt without its length."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def cluster(fields: Mapping[str, Any] | None, otherwise: str) -> str:
    """Which text a question is about, from what the log keeps of its data set's row."""
    for name in CLUSTERS:
        value = (fields or {}).get(name)
        if value is not None and value != "":
            return digest(name, value)
    return otherwise


def pick(names: Sequence[str], wanted: str | None, where: Path) -> str:
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


def as_number(value: Any, where: Path) -> float | None:
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
    number = float(value)
    if not 0 <= number <= 1:
        raise QualityError(
            f"{where} has a score of {number:g}; only scores from 0 to 1 can be compared. Choose "
            "another metric (--metric)"
        )
    return number


SCORE = "score"


def is_plain(path: Path) -> bool:
    """Whether a file is of the plain format."""
    return _is_plain(first_row(path))


def _is_plain(row: Row) -> bool:
    return "id" in row and SCORE in row


def read_plain(path: Path, metric: str | None) -> tuple[list[Sample], Printed]:
    """The samples of one plain file; a score of null was not given."""
    chosen, found = pick([SCORE], metric, path), []
    for number, row in enumerate(json_lines(path), 1):
        if not _is_plain(row):
            raise QualityError(f"sample {number} of {path} has no id or no score")
        question = str(row["id"])
        context = row.get("context")
        found.append(
            Sample(
                str(row.get("task", "samples")),
                question,
                question if context is None else str(context),
                digest(row.get("prompt")),
                chosen,
                as_number(row[SCORE], path),
            )
        )
    return found, {}
