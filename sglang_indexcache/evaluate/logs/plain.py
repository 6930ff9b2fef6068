"""Any other harness: a JSON object a line with the question's ``id`` and its ``score``, 0 to 1.

``context`` names the text that several questions share, ``task`` and ``prompt`` are compared if
they are there: runs with other prompts are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sglang_indexcache.errors import QualityError
from sglang_indexcache.evaluate.logs.sample import Row, Sample, as_number, digest, json_lines, pick

FILES = ("*.jsonl",)
SCORE = "score"


def fits(row: Row) -> bool:
    """Whether a row is of this format."""
    return "id" in row and SCORE in row


def read(path: Path, metric: str | None) -> Iterator[Sample]:
    """The samples of one file; a score of null was not given."""
    chosen = pick([SCORE], metric, path)
    for number, row in enumerate(json_lines(path), 1):
        if not fits(row):
            raise QualityError(f"sample {number} of {path} has no id or no score")
        question = str(row["id"])
        context = row.get("context")
        yield Sample(
            str(row.get("task", "samples")),
            question,
            question if context is None else str(context),
            digest(row.get("prompt")),
            chosen,
            as_number(row[SCORE], path),
        )
