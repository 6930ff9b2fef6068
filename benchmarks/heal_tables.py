"""The tables of benchmarks/results/heal.md, each made from the record beside it.

``heal.json`` was written by ``benchmarks/heal_study.py`` and ``heal_data.json`` by
``benchmarks/heal_data.py`` of commit f5319e1, ``heal_memory.json`` by ``benchmarks/heal_memory.py``
of commit 4d184eae, which also draws the figures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.records import estimate, markdown

TRAINING_FREE, ALL_F = "training-free", "full"
METRICS = {
    "text_loss": ("text loss, nats", 1),
    "answer_loss": ("loss of answer tokens, nats", 1),
    "recall": ("recall, points", 100),
    "needles": ("needles, points", 100),
}
"""A column's title, and the scale of the stored values."""
LABELS = tuple(label for label, _ in METRICS.values())
NAMES = {ALL_F: "all F", "uniform:1/4": "uniform 1/4", "tiny-dsa-1of4": "searched 1/4"}


def healing(record: dict[str, Any]) -> str:
    """Tabulate differences from untouched all F, with 95 % intervals."""
    rows = []
    for line in record["lines"][1:]:
        is_free = line["way"] == TRAINING_FREE
        cost = ("", "") if is_free else (line["steps"], len(line["seeds"]))
        rows.append((line["name"], line["way"], *cost, *_changes(line)))
    return markdown(("pattern", "way", "steps", "seeds", *LABELS), rows)


def grid(record: dict[str, Any]) -> str:
    """Tabulate the settings of healing that were tried, with one seed and pattern."""
    rows = [
        (f"{round(x['dense'] * x['steps'])} of {x['steps']}", f"{x['lr']:g}", *_changes(x))
        for x in record["grid"]
    ]
    return markdown(("dense steps", "learning rate", *LABELS), rows)


def _changes(line: dict[str, Any]) -> Iterator[str]:
    for name, (_, scale) in METRICS.items():
        change = line[name]
        yield estimate(change["over_all_f"] or 0.0, change["half_width"], scale)


def data(record: dict[str, Any]) -> str:
    """Tabulate a row for each text that was healed on, a column for each length asked at."""
    lines: Sequence[dict[str, Any]] = record["lines"]
    lengths = sorted({line["asked_at"] for line in lines})
    rows = []
    for way in dict.fromkeys(map(_way, lines)):
        by_length = {line["asked_at"]: line for line in lines if _way(line) == way}
        seeds = sorted({line["seeds"] for line in by_length.values() if line["healed_on"]})
        cells = (_recall(by_length.get(length)) for length in lengths)
        rows.append((way, *cells, ", ".join(map(str, seeds))))
    return markdown(("", *(f"asked at {n}" for n in lengths), "seeds"), rows)


def _way(line: dict[str, Any]) -> str:
    name = NAMES[line["pattern"]]
    if line["healed_on"] is None:
        return f"{name}, as it is"
    text = f"{name}, {line['steps']} steps on {line['healed_on']} at {line['length']}"
    sparse = line["sparse_length"]
    return f"{text}, the last quarter sparse at {sparse}" if sparse else text


def _recall(line: dict[str, Any] | None) -> str:
    if line is None:
        return "not measured"
    if line["pattern"] == ALL_F:
        return f"{line['recall']:.1f} %"
    return f"{line['over_all_f']:+.1f} ± {line['half_width'] or 0.0:.1f}"


def memory(record: dict[str, Any]) -> str:
    """Tabulate MiB by the length of a row."""
    header = ("tokens of a row", "dense step, MiB", "sparse step, MiB", "one L x L, MiB")
    names = ("dense_mib", "sparse_mib", "square_mib")
    rows = [
        (f"{row['length']:,}", *(f"{row[name]:,.0f}" for name in names)) for row in record["rows"]
    ]
    return markdown(header, rows)
