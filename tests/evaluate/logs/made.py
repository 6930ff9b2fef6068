"""Logs in each harness's published form, with the scores that a test wants.

Inspect's and sgl-eval's in ``data/`` were written by inspect-ai 0.3.285 and sgl-eval 0.1.3
themselves; lm-eval's and evalscope's follow `SampleResult` and `ReviewResult`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"
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
    """LongBench-like: four questions a document."""
    rows = []
    for number in range(changes.get("count", COUNT)):
        doc = {"context": f"document {number // 4}", "input": f"question {number}"}
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
    """As lm-eval's RULER writes it: the length is the metric, other lengths are -1."""
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


def evalscope(folder: Path, score: Score, *, failed: int = 0) -> Path:
    """A judged benchmark, two questions a set of documents."""
    rows = [
        {
            "index": number,
            "target": ["a"],
            "messages": [
                {"id": "x", "role": "user", "content": f"prompt {number}"},
                {"id": "y", "role": "assistant", "content": f"reply {folder.name}"},
            ],
            "agent_trace": None,
            "sample_score": {
                "score": {
                    "value": {} if number < failed else {"acc": score(number), "length": 3},
                    "status": "transport_error" if number < failed else "success",
                    "main_score_name": None if number < failed else "acc",
                },
                "sample_id": number,
                "group_id": number,
                "sample_metadata": {"data_source_urls": [f"set {number // 2}"]},
            },
        }
        for number in range(COUNT)
    ]
    return lines(folder / "reviews" / "some-model" / "aa_lcr_default.jsonl", rows)
