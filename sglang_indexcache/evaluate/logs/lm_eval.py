"""lm-evaluation-harness: ``samples_<task>_<date>.jsonl`` of ``--log_samples``.

Followed: ``EvaluationTracker.save_results_samples`` and ``SampleResult`` of lm-eval 0.4.13. A row
is one document under one filter; its scores lie under the names listed in ``metrics``. RULER's
tasks name their metrics by length and give -1 at the lengths that the document does not have.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from sglang_indexcache.errors import QualityError
from sglang_indexcache.evaluate.logs.sample import (
    Printed,
    Row,
    Sample,
    as_number,
    cluster,
    digest,
    first_row,
    json_lines,
    pick,
)

_NAME = re.compile(r"samples_(.+?)(?:_\d{4}-\d\d-\d\dT[\d.-]+)?$")


def fits(path: Path) -> bool:
    """Whether a file is of this format."""
    return {"doc_hash", "metrics"} <= first_row(path).keys()


def read(path: Path, metric: str | None) -> tuple[list[Sample], Printed]:
    """The samples of one task, and what ``results_<date>.json`` beside them says of it."""
    named = _NAME.match(path.stem)
    task = named[1] if named else path.stem
    rows = list(json_lines(path))
    names = sorted({name for row in rows for name in _metrics(row)})
    chosen, found = pick(names, metric, path), []
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
        found.append(
            Sample(
                task,
                question,
                cluster(row.get("doc") or {}, question),
                digest(row["doc_hash"], row["prompt_hash"], row["target_hash"]),
                chosen,
                as_number(row[name], path),
                length,
            )
        )
    return found, _printed(path, task, chosen)


def _printed(path: Path, task: str, metric: str) -> Printed:
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


def _metrics(row: Row) -> dict[str, tuple[int, str]]:
    """By name, with the filter where there is one: the length if it is named, and the field."""
    suffix = "" if row.get("filter", "none") == "none" else f",{row['filter']}"
    if row["metrics"] and all(name.isdigit() for name in row["metrics"]):
        asked = [name for name in row["metrics"] if row.get(name) != -1]
        return {f"score{suffix}": (int(name), name) for name in asked}
    return {f"{name}{suffix}": (0, name) for name in row["metrics"]}
