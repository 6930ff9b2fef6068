"""What healing gives back, by the data it is healed on and the length at which it is asked.

The table and the figure of a settled study, from its record. ``benchmarks/heal_data.py`` of commit
f5319e1 healed uniform 1/4 of the shipped small checkpoint on sources of the Python library, on
prose (Python's language reference) and on conversations (questions about functions of the library,
answered by their docstrings), none of which has the recall that is asked for, and on documents of
the asked task. No text that is asked about was healed on. A step was a row of 512 tokens, or as
many tokens in rows of another length. Some runs on sources ended with a quarter of their tokens in
sparse steps, of short or of long rows; and the searched pattern was healed on sources too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.records import markdown
from sglang_indexcache.study.plots import make_figure, save_figure

ALL_F = "full"
NAMES = {ALL_F: "all F", "uniform:1/4": "uniform 1/4", "tiny-dsa-1of4": "searched 1/4"}


def name_of(row: dict[str, Any]) -> str:
    """A line of the table in words."""
    plain = NAMES[row["pattern"]]
    if row["healed_on"] is None:
        return f"{plain}, as it is"
    told = f"{plain}, {row['steps']} steps on {row['healed_on']} at {row['length']}"
    return told + f", the last quarter sparse at {row['sparse_length']}" * bool(
        row["sparse_length"]
    )


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Markdown: a row for each way, a column for each length that was asked."""
    lengths = sorted({row["asked_at"] for row in lines})
    rows = []
    for name in dict.fromkeys(map(name_of, lines)):
        mine = {row["asked_at"]: row for row in lines if name_of(row) == name}
        seeds = sorted({row["seeds"] for row in mine.values() if row["healed_on"]})
        cells = (_cell(mine.get(length)) for length in lengths)
        rows.append((name, *cells, ", ".join(map(str, seeds))))
    return markdown(("", *(f"asked at {n}" for n in lengths), "seeds"), rows)


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "not measured"
    if row["pattern"] == ALL_F:
        return f"{row['recall']:.1f} %"
    return f"{row['over_all_f']:+.1f} ± {row['half_width'] or 0.0:.1f}"


def draw(found: dict[str, Any], path: Path) -> None:
    """Points over all F, one panel for each length that was asked."""
    lines = found["lines"]
    lengths = sorted({row["asked_at"] for row in lines})
    shown = [row for row in lines if row["pattern"] != ALL_F]
    names = list(dict.fromkeys(map(name_of, shown)))
    figure, axes = make_figure(4 + 2.6 * len(lengths), 1.4 + 0.34 * len(names), 1, len(lengths))
    for axis, length in zip(axes, lengths, strict=True):
        for place, name in enumerate(names):
            found = [r for r in shown if name_of(r) == name and r["asked_at"] == length]
            for row in found:
                healed = "healed" if row["healed_on"] else "not healed"
                axis.errorbar(
                    row["over_all_f"],
                    place,
                    xerr=row["half_width"],
                    fmt="o",
                    capsize=3,
                    color="C0" if row["healed_on"] else "C1",
                    label=f"{healed}; bars: 95 %, over seeds and documents",
                )
        axis.axvline(0, color="grey", linewidth=0.8)
        axis.set_ylim(len(names) - 0.5, -0.5)
        axis.set_yticks(range(len(names)), names if axis is axes[0] else [""] * len(names))
        axis.set_title(f"asked at {length} tokens", fontsize=9)
        axis.set_xlabel("recall, points over all F")
        axis.grid(alpha=0.3)
    handles, texts = axes[0].get_legend_handles_labels()
    unique = dict(zip(texts, handles, strict=True))
    figure.legend(
        unique.values(), unique, loc="outside lower center", ncols=2, frameon=False, fontsize=8
    )
    save_figure(figure, path)
