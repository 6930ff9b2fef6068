"""lm-evaluation-harness: ``samples_<task>_<date>.jsonl`` of ``--log_samples``.

Followed: ``EvaluationTracker.save_results_samples`` and ``SampleResult`` of lm-eval 0.4.13. A row
is one document under one filter; its scores lie under the names listed in ``metrics``. RULER's
tasks name their metrics by length and give -1 at the lengths that the document does not have.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from sglang_indexcache.evaluate.logs.sample import (
    Row,
    Sample,
    as_number,
    cluster,
    digest,
    json_lines,
    pick,
)

FILES = ("samples_*.jsonl",)
_NAME = re.compile(r"samples_(.+?)(?:_\d{4}-\d\d-\d\dT[\d.-]+)?$")


def fits(row: Row) -> bool:
    """Whether a row is of this format."""
    return "doc_hash" in row and "metrics" in row


def task_of(path: Path) -> str:
    """The task that a file is named after."""
    found = _NAME.match(path.stem)
    return found[1] if found else path.stem


def read(path: Path, metric: str | None) -> Iterator[Sample]:
    """The samples of one task."""
    task = task_of(path)
    rows = list(json_lines(path))
    names = sorted({name for row in rows for name in _scores(row)})
    chosen = pick(names, metric, path)
    for row in rows:
        scores = _scores(row)
        if chosen in scores:
            number, length = scores[chosen]
            doc = row.get("doc") or {}
            question = str(row["doc_id"])
            yield Sample(
                task,
                question,
                cluster(doc, question),
                digest(row["doc_hash"], row["prompt_hash"], row["target_hash"]),
                chosen,
                as_number(number, path),
                length,
            )


def _scores(row: Row) -> dict[str, tuple[float, int]]:
    """By name, with the filter where there is one: the score, and the length if it is named."""
    suffix = "" if row.get("filter", "none") == "none" else f",{row['filter']}"
    if row["metrics"] and all(name.isdigit() for name in row["metrics"]):
        asked = [name for name in row["metrics"] if row[name] != -1]
        return {f"score{suffix}": (row[name], int(name)) for name in asked}
    return {f"{name}{suffix}": (row[name], 0) for name in row["metrics"]}
