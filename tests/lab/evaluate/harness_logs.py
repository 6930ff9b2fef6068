"""Logs in each harness's form, with the scores that a test wants; lm-eval's as `SampleResult`."""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

Score = Callable[[int], float]
COUNT = 40


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def hashed(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def lm_eval(
    folder: Path, score: Score, *, metrics: tuple[str, ...] = ("acc",), **changes: Any
) -> Path:
    """Write logs like LongBench's: four questions a document, or as many as ``groups`` has."""
    count = changes.get("count", COUNT)
    groups = changes.get("groups", [4] * -(-count // 4))
    texts = [text for text, questions in enumerate(groups) for _ in range(questions)]
    rows = []
    for number, text in enumerate(texts[:count]):
        doc = {"context": f"document {text}", "input": f"question {number}"}
        rows.append(
            {
                "doc_id": number,
                "doc": doc,
                "target": "a",
                "arguments": {"gen_args_0": {"arg_0": f"prompt {number}", "arg_1": {}}},
                "resps": [["a"]],
                "filtered_resps": ["a"],
                "filter": changes.get("filter", "none"),
                "metrics": list(metrics),
                "doc_hash": hashed(str(doc)),
                "prompt_hash": hashed(f"{changes.get('prompt', 'prompt')} {number}"),
                "target_hash": hashed("a"),
                **{name: score(number) for name in metrics},
            }
        )
    task = changes.get("task", "longbench_qasper")
    return lines(folder / "model" / f"samples_{task}_2026-11-22T10-00-00.123456.jsonl", rows)


def ruler(folder: Path, score: Score) -> Path:
    """Write logs as lm-eval's RULER does: the length is the metric, other lengths are -1."""
    rows = []
    for number in range(COUNT):
        length = (4096, 8192)[number % 2]
        values = {"4096": -1.0, "8192": -1.0} | {str(length): score(number)}
        rows.append(
            {
                "doc_id": number,
                "doc": {"index": number, "max_length": length},
                "filter": "none",
                "metrics": list(values),
                "doc_hash": hashed(f"d{number}"),
                "prompt_hash": hashed(f"p{number}"),
                "target_hash": hashed("t"),
                **values,
            }
        )
    return lines(folder / "samples_niah_single_1_2026-11-22T10-00-00.123456.jsonl", rows)


def plain(folder: Path, score: Score, count: int = COUNT) -> Path:
    """Write logs of two questions a text."""
    rows = [
        {"id": number, "context": number // 2, "prompt": f"p{number}", "score": score(number)}
        for number in range(count)
    ]
    return lines(folder / "scores.jsonl", rows)
