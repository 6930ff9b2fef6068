"""Rows as the data sets publish them, made by hand, and files of them."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def mrcr_row(number: int, turns: int = 4, words: int = 12) -> Row:
    """Return a conversation of look-alike poems, the second of which is asked for."""
    messages = []
    for turn in range(turns):
        messages += [
            {"role": "user", "content": "Write a poem about tapirs"},
            {"role": "assistant", "content": poem(number, turn, words)},
        ]
    mark = hashlib.md5(str(number).encode()).hexdigest()[:10]
    request = (
        f"Prepend {mark} to the 2nd (1 indexed) poem about tapirs. "
        "Do not include any other text in your response."
    )
    return {
        "prompt": json.dumps([*messages, {"role": "user", "content": request}]),
        "answer": mark + poem(number, 1, words),
        "random_string_to_prepend": mark,
        "n_needles": turns,
        "desired_msg_index": 3,
        "total_messages": len(messages) + 1,
        "n_chars": sum(len(message["content"]) for message in messages),
    }


def poem(number: int, turn: int, words: int) -> str:
    return " ".join(f"line {(number * 31 + turn * 7 + word) % 97}" for word in range(words))


EXAMPLE = (
    "You will be given a graph as a list of directed edges.\n<begin example>\nThe graph has the "
    "following edges:\nuvwx -> alke\nabcd -> uvwx\nabcd -> efgh\nefgh -> uvwx\n"
    "Operation:\nFind the parents of node uvwx.\nFinal Answer: [abcd, efgh]\n<end example>\n"
    "Here is the graph to operate on:\nThe graph has the following edges:\n"
)
CLOSING = (
    "\nYou should immediately return the set of nodes, as Final Answer: [..], in the last line."
)


def node(number: int) -> str:
    return hashlib.md5(str(number).encode()).hexdigest()[:10]


def graphwalks_row(number: int, kind: str = "parents", edges: int = 24) -> Row:
    """A graph in which node 0 has the parents 5, 3 and itself; the answer is out of order."""
    graph = [(number + n + 10, number + n + 40) for n in range(edges)]
    graph[2:2] = [(5, 0), (0, 0)]
    graph[9:9] = [(3, 0), (5, 0)]
    lines = "\n".join(f"{node(a)} -> {node(b)}" for a, b in graph)
    operation = {
        "parents": f"Find the parents of node {node(0)}.",
        "bfs": f"Perform a BFS from node {node(0)} with depth 1.",
    }[kind]
    prompt = f"{EXAMPLE}{lines}\nOperation:\n{operation}{CLOSING}"
    return {
        "prompt": prompt,
        "answer_nodes": [node(3), node(5)],
        "prompt_chars": len(prompt),
        "problem_type": kind,
        "date_added": "02-27-2026",
    }


def longbench_row(number: int, words: int = 60) -> Row:
    return {
        "_id": f"id{number}",
        "domain": "Single-Document QA",
        "difficulty": "easy",
        "length": "short",
        "question": " Which line comes first? ",
        **{f"choice_{letter}": f"line {n}" for n, letter in enumerate("ABCD")},
        "answer": "ABCD"[number % 4],
        "context": f"Document {number}: {poem(number, 0, words)}\n",
    }


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
