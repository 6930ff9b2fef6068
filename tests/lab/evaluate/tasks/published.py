"""Rows as the data sets publish them, made by hand, and files of them."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def poem(number: int, turn: int, words: int) -> str:
    return " ".join(f"line {(number * 31 + turn * 7 + word) % 97}" for word in range(words))


def aa_lcr_row(number: int, words: int = 60) -> Row:
    return {
        "question": f" Which line comes first in {number}? ",
        "answer": f"line {number},\nthen none ",
        "context": f"BEGIN DOCUMENT 1:\n{number}: {poem(number, 0, words)}\nEND DOCUMENT 1\n",
    }


def prompt_row(number: int, answer: str | None = None, words: int = 70) -> Row:
    row: Row = {"prompt": f"Prompt {number}: {poem(number, 2, words)}"}
    return row if answer is None else row | {"answer": answer}


def write(path: Path, rows: Sequence[Any]) -> Path:
    """Write rows as .parquet, .csv, .json or .jsonl."""
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".json":
        path.write_text(json.dumps(list(rows)))
    else:
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path
