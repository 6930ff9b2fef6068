"""Text loss and recall of the model under patterns: what every study here reads.

Each row of a held-out book is run under every arm, so arms are compared row by row. A record keeps
each row's two numbers; means and intervals are made of them. Intervals are t intervals of 95 %
over rows, which are cut evenly from whole books: they say nothing of other books.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.records import estimate
from benchmarks.smollm2.books import Row
from benchmarks.smollm2.convert import STEEPNESS
from benchmarks.smollm2.lean import Lean, State
from benchmarks.smollm2.workers import each
from sglang_indexcache.errors import QualityError
from sglang_indexcache.lab.runs.journal import Journal
from sglang_indexcache.lab.stats.bounds import half_width
from sglang_indexcache.pattern import Pattern

Line = dict[str, Any]


@dataclass(frozen=True)
class Arm:
    """A way to run the model.

    Attributes:
        name: what tables call it.
        pattern: None attends to everything.
        topk: tokens that a query attends to; 0 without a pattern.
        original: with the frequencies of RoPE that SmolLM2 was trained with.
    """

    name: str
    pattern: Pattern | None = None
    topk: int = 0
    original: bool = False


def measure(
    model: Lean,
    arms: Sequence[Arm],
    rows: Sequence[Row],
    cache: Path,
    digest: str,
    say: Callable[[str], None],
) -> list[Line]:
    """Run every arm on every row; a line holds loss, recall_loss and recall (share right).

    Args:
        cache: keeps what is done, so that it is not done again.
        digest: of the checkpoint.
    """

    def work(job: tuple[int, Arm]) -> tuple[str, Line]:
        number, arm = job
        return _key(rows[number], arm), {"row": number, **one(model, arm, rows[number])}

    dtype = str(model.dtype).removeprefix("torch.")
    path = cache / "measured" / f"{digest[:12]}-{dtype}.jsonl"
    identity = {"checkpoint": digest, "dtype": dtype}
    with Journal(path, identity, "study of this checkpoint", QualityError) as journal:
        recorded = {line.pop("key"): line for line in journal.entries}
        jobs = [(number, arm) for number in range(len(rows)) for arm in arms]
        by_key = {_key(rows[number], arm): (number, arm) for number, arm in jobs}
        missing = [job for key, job in by_key.items() if key not in recorded]
        for count, (key, line) in enumerate(each(work, missing, model.device.type), 1):
            recorded[key] = line
            journal.write({"key": key, **line})
            say(f"{count} of {len(missing)}: {key} {line}")
    return [
        {
            "name": arm.name,
            "pattern": None if arm.pattern is None else str(arm.pattern),
            "topk": arm.topk,
            "rows": [recorded[_key(row, arm)] for row in rows],
        }
        for arm in arms
    ]


def one(model: Lean, arm: Arm, row: Row, start: State | None = None) -> Line:
    """Run one row under one arm."""
    settings = model.topk, model.frequencies
    try:
        model.topk = arm.topk or model.topk
        if arm.original:
            model.frequencies = original_ladder(model)
        stream = model.hidden(row.ids, arm.pattern, start=start)
        text, _ = model.losses(stream, row.ids, row.text)
        recall, right = model.losses(stream, row.ids, row.recall)
    finally:
        model.topk, model.frequencies = settings
    return {
        "loss": round(text.mean().item(), 5),
        "recall_loss": round(recall.mean().item(), 5),
        "recall": round(right.float().mean().item(), 5),
    }


def original_ladder(model: Lean) -> torch.Tensor:
    """Return ``[rope / 2]``: the frequencies by slot that SmolLM2 was trained with."""
    base = float(1.0 / model.frequencies[1]) ** (len(model.frequencies) / STEEPNESS)
    steps = torch.arange(0, model.form.width, 2, dtype=torch.float64) / model.form.width
    ladder = (round(base) ** -steps).repeat_interleave(model.form.groups).float()
    return ladder.to(model.device)


def _key(row: Row, arm: Arm) -> str:
    """Return the words that tell a measurement from every other."""
    pattern = "original" if arm.original else arm.pattern or "dense"
    return f"{len(row.ids)}:{row.digest} {pattern} {arm.topk}"


# -- tables ------------------------------------------------------------------------------------


def compared(line: Line, base: Line, field: str) -> tuple[float, float | None]:
    """Compare a number with the base's of the same row: the mean, and half its interval."""
    pairs = zip(line["rows"], base["rows"], strict=True)
    over = [mine[field] - its[field] for mine, its in pairs]
    return sum(over) / len(over), half_width(over)


def mean(line: Line, field: str) -> float:
    """Return the mean of a field over rows."""
    return sum(row[field] for row in line["rows"]) / len(line["rows"])


def columns(line: Line, base: Line) -> list[str]:
    """Return loss, what it adds (nats, perplexity), recall and what that adds, as text."""
    added, margin = compared(line, base, "loss")
    recall, recall_margin = compared(line, base, "recall")
    is_base = line is base
    return [
        f"{mean(line, 'loss'):.3f}",
        "" if is_base else estimate(added, margin),
        "" if is_base else f"{100 * math.expm1(added):+.2f} %",
        f"{100 * mean(line, 'recall'):.1f}",
        "" if is_base else estimate(recall, recall_margin, 100),
    ]


HEADER = ("text loss, nats", "added", "perplexity", "recall, %", "added")


def full(model: Lean) -> Pattern:
    """Return the pattern of F layers alone."""
    return Pattern.full(model.layers)


def named(names: Iterable[str], layers: int) -> dict[str, Pattern]:
    """Return blind patterns by the names that tables give them.

    ``1/4`` is the paper's uniform one, ``1/4 freq`` SGLang's frequency schedule, which keeps
    layers 0 and 1.
    """
    patterns = {}
    for name in names:
        step = int(name.removesuffix(" freq").split("/")[1])
        make = Pattern.from_freq if name.endswith(" freq") else Pattern.uniform
        patterns[name] = make(layers, step)
    return patterns
