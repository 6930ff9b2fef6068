"""Any other harness: a JSON object a line with the question's ``id`` and its ``score``, 0 to 1.

``context`` names the text that several questions share, ``task`` and ``prompt`` are compared if
they are there: runs with other prompts are refused.
"""

from __future__ import annotations

from pathlib import Path

from sglang_indexcache.errors import QualityError
from sglang_indexcache.evaluate.logs.sample import (
    Printed,
    Row,
    Sample,
    as_number,
    digest,
    first_row,
    json_lines,
    pick,
)

SCORE = "score"


def fits(path: Path) -> bool:
    """Whether a file is of this format."""
    return _fits(first_row(path))


def _fits(row: Row) -> bool:
    return "id" in row and SCORE in row


def read(path: Path, metric: str | None) -> tuple[list[Sample], Printed]:
    """The samples of one file; a score of null was not given."""
    chosen, found = pick([SCORE], metric, path), []
    for number, row in enumerate(json_lines(path), 1):
        if not _fits(row):
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
