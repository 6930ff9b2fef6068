"""Recovery by healing, by the data it is healed on and the length at which it is asked.

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
from sglang_indexcache.study.plots import BLUE, FULL, make_figure, save_figure

ALL_F = "full"
NAMES = {ALL_F: "all F", "uniform:1/4": "uniform 1/4", "tiny-dsa-1of4": "searched 1/4"}


def name_of(row: dict[str, Any]) -> str:
    """Name a line of the table in words."""
    plain = NAMES[row["pattern"]]
    if row["healed_on"] is None:
        return f"{plain}, as it is"
    label = f"{plain}, {row['steps']} steps on {row['healed_on']} at {row['length']}"
    return label + f", the last quarter sparse at {row['sparse_length']}" * bool(
        row["sparse_length"]
    )


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Tabulate, a row for each way, a column for each length that was asked."""
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


def draw(record: dict[str, Any], path: Path) -> None:
    """Draw points over all F, a panel for each length that was asked; ways of a kind together."""
    lines = record["lines"]
    lengths = sorted({row["asked_at"] for row in lines})
    sharing = [row for row in lines if row["pattern"] != ALL_F]
    groups: dict[str, list[str]] = {}
    for row in sharing:
        names = groups.setdefault(_group_of(row), [])
        if _short_name(row) not in names:
            names.append(_short_name(row))
    places: dict[tuple[str, str], float] = {}
    headings: dict[str, float] = {}
    place = 0
    for group, names in groups.items():
        headings[group] = place
        for number, name in enumerate(names, start=1):
            places[group, name] = place + number
        place += len(names) + 1
    figure, axes = make_figure(
        2.2 + 2.3 * len(lengths), 1.2 + 0.2 * place, 1, len(lengths), sharey=True
    )
    for axis, length in zip(axes, lengths, strict=True):
        for row in (row for row in sharing if row["asked_at"] == length):
            axis.errorbar(
                row["over_all_f"],
                places[_group_of(row), _short_name(row)],
                xerr=row["half_width"],
                fmt="o",
                ms=4,
                capsize=2,
                color=BLUE if row["healed_on"] else FULL,
            )
        axis.axvline(0, color="black", linewidth=0.8)
        axis.set_title(f"asked at {length} tokens", fontsize=9)
        axis.set_xlabel("recall, points over all F", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.3)
    ticks = {
        **{at: name for (_, name), at in places.items()},
        **{at: g for g, at in headings.items()},
    }
    axes[0].set_yticks(list(ticks), list(ticks.values()))
    axes[0].set_ylim(place - 0.5, -0.7)
    for label, at in zip(axes[0].get_yticklabels(), ticks, strict=True):
        label.set_fontweight("bold" if at in headings.values() else "normal")
    figure.supxlabel("grey: not healed; bars: 95 %, over seeds and documents", fontsize=8)
    save_figure(figure, path)


def _group_of(row: dict[str, Any]) -> str:
    """Return what many ways have in common: pattern and steps."""
    if row["healed_on"] is None:
        return "as it is"
    return f"{NAMES[row['pattern']]}, {row['steps']} steps"


def _short_name(row: dict[str, Any]) -> str:
    """Return what tells a way from the others of its group."""
    if row["healed_on"] is None:
        return NAMES[row["pattern"]]
    sparse = f", then sparse at {row['sparse_length']}" * bool(row["sparse_length"])
    return f"{row['healed_on']} at {row['length']}{sparse}"
