"""Make prompts for ``indexcache eval run --rows prompts=FILE`` of the rows of a public data set.

python examples/public_rows.py mrcr.parquet mrcr.jsonl

This one is openai/mrcr (MIT): repeat the i-th of several look-alike answers of a conversation. For
another set write another `prompt_of`. An answer is right to the letter, so leave rows out whose
answer can be written in several ways, and mind that choices are guessed: of four, 25 % are right.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_indexcache.lab.data.rows import read_rows


def prompt_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return one of our rows: a conversation, and what the model must say to the letter."""
    return {"messages": json.loads(row["prompt"]), "answer": row["answer"]}


def main(source: str, target: str) -> None:
    """Read .parquet, .csv, .json or .jsonl, and write a line for each row."""
    rows = [prompt_of(row.value) for row in read_rows(Path(source))]
    Path(target).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    print(f"{len(rows)} rows are in {target}")


if __name__ == "__main__":
    main(*sys.argv[1:3])
