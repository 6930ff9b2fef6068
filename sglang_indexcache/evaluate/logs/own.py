"""Our own: ``samples.jsonl`` of an evaluation's report, one of its arms."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from sglang_indexcache.errors import QualityError
from sglang_indexcache.evaluate.logs.sample import Row, Sample, as_number, digest, json_lines, pick

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
    """The first answers of one arm; contexts of one name have one text if made of the same.

    Those of the control, where no pattern can matter, are left out.

    Raises:
        QualityError: nothing says what the contexts were made of.
    """
    chosen = pick(METRICS, metric or METRICS[0], path)
    record = path.with_name("eval.json")
    about = json.loads(record.read_text()) if record.exists() else {}
    material, selects_all = about.get("facts", {}).get("material"), about.get("selects_all", 0)
    if not material:
        raise QualityError(
            f"{record} does not say what its contexts were made of, so nothing shows that another "
            "evaluation asked the same. Write it again from the journal (indexcache eval report "
            "FOLDER); if that does not help, the journal is too old: evaluate anew"
        )
    for row in json_lines(path):
        if row["arm"] == arm and row["repeat"] == 0 and row["length"] > selects_all:
            yield Sample(
                row["task"],
                f"{row['context']} {row['question']}",
                row["context"],
                digest(material, row["task"], row["length"], row["depth"]),
                chosen,
                as_number(row[chosen], path),
                row["length"],
            )
