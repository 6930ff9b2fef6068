"""The tables of the recent window's studies, from their records.

What the window mends on the small checkpoint it does not on a real model (docs/real-model.md); the
scripts that measured are gone (benchmarks/README.md).
"""

from __future__ import annotations

from typing import Any

from benchmarks.records import markdown

Cell = dict[str, Any]


def groups(found: list[Cell]) -> dict[tuple[int, int], list[Cell]]:
    """Group the cells by setting, the shortest texts and lists first."""
    by: dict[tuple[int, int], list[Cell]] = {}
    for cell in sorted(found, key=lambda cell: (cell["length"], cell["topk"])):
        by.setdefault((cell["topk"], cell["length"]), []).append(cell)
    return by


def table(found: list[Cell]) -> str:
    """Markdown: a row for a setting and pattern, a column for a window."""
    windows = sorted({cell["window"] for cell in found})
    rows = []
    for (topk, length), some in groups(found).items():
        for pattern in dict.fromkeys(cell["pattern"] for cell in some):
            row = {cell["window"]: cell for cell in some if cell["pattern"] == pattern}
            rows.append((topk, length, pattern, *(_points(row.get(w)) for w in windows)))
    return markdown(("list", "tokens", "pattern", *(f"w = {w}" for w in windows)), rows)


def _points(cell: Cell | None) -> str:
    if cell is None:
        return ""
    low, high = cell["interval"] or (None, None)
    around = "" if low is None else f" ({low:+.1f} to {high:+.1f})"
    return f"{cell['difference']:+.1f}{around}"


def searches_table(told: list[dict[str, Any]]) -> str:
    """Markdown: a row for F layers and a way to choose them, a column for a window."""
    rows = []
    for target in dict.fromkeys(one["target"] for one in told):
        for how in dict.fromkeys(one["how"] for one in told):
            both = [one for one in told if (one["target"], one["how"]) == (target, how)]
            rows.append((both[0]["pattern"].count("F"), how, *map(_in_words, both)))
    return markdown(("F layers", "chosen", "w = 0", "w = 8"), rows)


def _in_words(one: dict[str, Any]) -> str:
    low, high = one["interval"]
    return f"{one['difference']:+.1f} ({low:+.1f} to {high:+.1f})"


def healing_table(told: list[dict[str, Any]]) -> str:
    """Markdown: a row for a number of steps; what is over all F of the checkpoint as it is."""
    over: dict[int, list[str]] = {}
    for one in told:
        lost = 1000 * (one["loss"] - one["all_full"])
        over.setdefault(one["steps"], []).append(f"{lost:+.1f}")
    rows = [(steps, *cells) for steps, cells in over.items()]
    return markdown(("steps", "w = 0", "w = 8"), rows)
