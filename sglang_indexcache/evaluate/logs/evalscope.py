"""evalscope: ``reviews/<model>/<benchmark>_<subset>.jsonl``.

Followed: ``ReviewResult`` and ``SampleScore`` of evalscope 1.14.1. A score whose status is neither
success nor fallback is no score: a judge that failed is not a wrong answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sglang_indexcache.evaluate.logs.sample import (
    Row,
    Sample,
    as_number,
    cluster,
    digest,
    json_lines,
    pick,
)

FILES = ("reviews/*/*.jsonl", "*.jsonl")
_SCORED = ("success", "fallback")


def fits(row: Row) -> bool:
    """Whether a row is of this format."""
    return "sample_score" in row and "index" in row


def read(path: Path, metric: str | None) -> Iterator[Sample]:
    """The samples of one benchmark's subset."""
    rows = list(json_lines(path))
    mains = {name for row in rows if (name := row["sample_score"]["score"].get("main_score_name"))}
    every = sorted({name for row in rows for name in row["sample_score"]["score"]["value"]})
    names = sorted(mains) if metric is None and len(mains) == 1 else every
    chosen = pick(names, metric, path)
    for row in rows:
        found = row["sample_score"]
        score = found["score"]
        usable = score.get("status", "success") in _SCORED
        value = score["value"].get(chosen) if usable else None
        group = found.get("group_id")
        question = str(row["index"] if group is None else group)
        messages = list(row.get("messages") or [])
        if messages and messages[-1].get("role") == "assistant":
            messages.pop()  # the answer; what went before it is the prompt
        said = [(message.get("role"), message.get("content")) for message in messages]
        yield Sample(
            path.stem,
            question,
            cluster(found.get("sample_metadata"), question),
            digest(said or row.get("input", ""), row.get("target")),
            chosen,
            as_number(value, path),
        )
