"""sgl-eval, SGLang's own kit: ``output-rs<repeat>.jsonl`` in ``sgl_eval_<benchmark>_<date>``.

Followed: ``PredictionsWriter`` of sgl-eval 0.1.3. The prompt is there only for short tasks; the
expected answer always.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from sglang_indexcache.evaluate.logs.sample import Row, Sample, as_number, digest, json_lines, pick

FILES = ("output-rs*.jsonl",)
SCORES = ("is_correct", "symbolic_correct")


def fits(row: Row) -> bool:
    """Whether a row is of this format."""
    return "expected_answer" in row and any(name in row for name in SCORES)


def read(path: Path, metric: str | None) -> Iterator[Sample]:
    """The samples of one repeat."""
    task = _task(path.parent)
    for row in json_lines(path):
        chosen = pick([name for name in SCORES if name in row], metric, path)
        failed = row.get("finish_reason") == "error"
        yield Sample(
            task,
            str(row["id"]),
            str(row["id"]),
            digest(row.get("problem", ""), row["expected_answer"]),
            chosen,
            None if failed else as_number(row[chosen], path),
        )


def _task(folder: Path) -> str:
    record = folder / "metrics.json"
    if record.exists():
        return str(json.loads(record.read_text(encoding="utf-8"))["name"])
    found = re.fullmatch(r"sgl_eval_(.+?)_\d.*", folder.name)
    return found[1] if found else "samples"
