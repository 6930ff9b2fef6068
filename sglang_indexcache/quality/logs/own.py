"""Our own: ``samples.jsonl`` of an evaluation's report, one of its arms."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from sglang_indexcache.quality.logs.sample import Row, Sample, as_number, digest, json_lines, pick

FILES = ("samples.jsonl",)
METRICS = ("right", "score", "agreement")


def fits(row: Row) -> bool:
    """Whether a row is of this format."""
    return all(name in row for name in ("arm", "repeat", "context", "question", "right"))


def arms(path: Path) -> list[str]:
    """Whose answers are there."""
    return list(dict.fromkeys(row["arm"] for row in json_lines(path)))


def read(path: Path, metric: str | None) -> Iterator[Sample]:
    """The first answers of the only arm."""
    yield from read_arm(path, metric, arms(path)[0])


def read_arm(path: Path, metric: str | None, arm: str) -> Iterator[Sample]:
    """The first answers of one arm; contexts of one seed have one name and one text.

    Those of the control, where no pattern can matter, are left out.
    """
    chosen = pick(METRICS, metric or METRICS[0], path)
    record = path.with_name("eval.json")
    selects_all = json.loads(record.read_text())["selects_all"] if record.exists() else 0
    for row in json_lines(path):
        if row["arm"] == arm and row["repeat"] == 0 and row["length"] > selects_all:
            yield Sample(
                row["task"],
                f"{row['context']} {row['question']}",
                row["context"],
                digest(row["task"], row["length"], row["depth"]),
                chosen,
                as_number(row[chosen], path),
                row["length"],
            )
