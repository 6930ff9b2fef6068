"""The tables of benchmarks/results/search/README.md, each made from the results beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from benchmarks.records import RESULTS, markdown

Record = Mapping[str, Any]

_TASKS = ("needles", "recall", "interleaved", "prose")
_LOSSES = ("all", "late", "answers")
_RANKED = (*_LOSSES, "kl")
_METHODS = {"greedy": "greedy", "fast, refined": "fast"}


def intervals(record: Record) -> str:
    """Tabulate how often Student's interval and ours cover a loss, by number of documents."""
    worlds = {f"made up: {name}": row for name, row in record["made_up"].items()}
    worlds |= {f"shipped: `{name}`": row for name, row in record["shipped"].items()}
    worlds |= {
        f"found on landscapes: {name}": row["documents"] for name, row in record["searched"].items()
    }
    counts = list(record["unseen_share"])
    rows = []
    for name, row in worlds.items():
        cells = []
        for count in counts:
            student, ours = (row[count][kind]["covers"] for kind in ("student", "ours"))
            cells.append(f"{100 * student:.0f} → {100 * ours:.0f}")
        rows.append((name, *cells))
    title = f"Covers, % of {record['runs']:,} runs (landscapes: a twentieth): Student's → ours"
    return markdown(("", *(f"{count} documents" for count in counts)), rows, title)


def worst(record: Record) -> str:
    """Tabulate what our interval covers with and without the two documents that lose most."""
    rows = []
    for name, row in record["shipped_worst"].items():
        cells = [
            f"{100 * cell['hold_none']:.0f} %: {100 * cell['covers_without']:.0f}; "
            f"{100 * cell['covers_with']:.0f}"
            for cell in row.values()
        ]
        rows.append((f"`{name}`", *cells))
    counts = next(iter(record["shipped_worst"].values()))
    title = "Runs without the two worst documents: covers, % of these; of the others"
    return markdown(("", *(f"{count} documents" for count in counts)), rows, title)


def unlikely(record: Record) -> str:
    """Tabulate how often `search compare` called the true loss unlikely."""
    shares = record["called_unlikely"]
    rows = []
    for share, row in shares.items():
        cells = [f"{100 * cell['student']:.0f} → {100 * cell['ours']:.0f}" for cell in row.values()]
        rows.append((f"true loss {100 * float(share):g} %", *cells))
    counts = next(iter(shares.values()))
    title = "Called unlikely and true, % of runs: before → now"
    return markdown(("", *(f"{count} documents" for count in counts)), rows, title)


def levels(record: Record) -> str:
    """Write the study's tasks: what all F gets right, and who guesses."""
    rows = []
    for setting in record["settings"]:
        length = str(setting["length"])
        full = next(p for p in setting["patterns"] if p["because"] == "all F")["held_out"]
        right = [f"{100 * full[task]['accuracy']:.0f}" for task in _TASKS]
        rows.append((length, "all F, % right", *right))
        guessed = [f"{100 * setting['chance'][task]:.0f}" for task in _TASKS]
        rows.append((length, "chance, %", *guessed))
    return markdown(("tokens", "", *_TASKS), rows)


def searched(record: Record) -> str:
    """Write what the study's searches found; not at 6 F where selections are starved."""
    rows = []
    for setting in record["settings"]:
        held_out = {p["pattern"]: p["held_out"] for p in setting["patterns"]}
        counts = (3, 2) if setting["name"] == "starved" else (6, 3, 2)
        for count in counts:
            for pattern, by in _found_by(setting["descents"], count).items():
                cells = [_points(held_out[pattern][task]) for task in _TASKS]
                rows.append((str(setting["length"]), str(count), by, f"`{pattern}`", *cells))
    header = ("tokens", "F", "found by", "pattern", *_TASKS)
    return markdown(header, rows)


def _found_by(descents: Mapping[str, Any], count: int) -> dict[str, str]:
    """Return the methods and objectives that arrived at each pattern."""
    objectives: dict[str, dict[str, list[str]]] = {}
    for method, name in _METHODS.items():
        for objective in _LOSSES:
            pattern = descents[method][objective][str(count)]
            objectives.setdefault(pattern, {}).setdefault(name, []).append(objective)
    return {
        pattern: "; ".join(f"{name} on {', '.join(on)}" for name, on in by.items())
        for pattern, by in objectives.items()
    }


def ranks(record: Record) -> str:
    """Write how the study's objectives rank patterns."""
    rows = []
    for setting in record["settings"]:
        for count, ranked in setting["correlation"].items():
            for objective in _RANKED:
                by_task = ranked[objective]
                mean = by_task["mean of four"]
                rows.append(
                    (
                        str(setting["length"]),
                        f"{count} F, {ranked['patterns']}",
                        f"`{objective}`",
                        *(f"{by_task[task]['rho']:.2f}" for task in _TASKS),
                        f"{mean['rho']:.2f} ({mean['low']:.2f} to {mean['high']:+.2f})",
                    )
                )
    header = ("tokens", "patterns", "objective", *_TASKS, "mean of four")
    return markdown(header, rows)


def served(record: Record) -> str:
    """Write what searches over HTTP found on each objective, and held-out answers right."""
    full = record["full"]["tasks"]
    right = [f"{100 * full[task]['accuracy']:.0f}" for task in _TASKS]
    rows = [("12", "all F", f"`{record['full']['pattern']}`", *right)]
    counts = list(next(iter(record["found"].values())))
    for count in counts:
        by: dict[str, list[str]] = {}
        for name, marks in record["found"].items():
            by.setdefault(marks[count]["pattern"], []).append(name)
        for pattern, names in by.items():
            tasks = record["found"][names[0]][count]["tasks"]
            cells = [_points(tasks[task]) for task in _TASKS]
            rows.append((count, ", ".join(names), f"`{pattern}`", *cells))
    return markdown(("F", "found by", "pattern", *_TASKS), rows)


def shipped(record: Record) -> str:
    """Write the shipped checkpoint's patterns: calibration loss, and held out against all F."""
    comparison = json.loads((RESULTS / "search/tiny-dsa/compare.json").read_text(encoding="utf-8"))
    held_out = {row["pattern"]: row["difference"] for row in comparison["comparisons"]}
    rows = []
    for mark in record["marks"]:
        blind = mark["baselines"]["uniform"]
        rows.append(
            (
                mark["retention"],
                f"`{mark['pattern']}`",
                f"{mark['loss'] - record['start']['loss']:+.3f}",
                _interval(held_out[mark["pattern"]]),
                _interval(held_out[blind["pattern"]]),
            )
        )  # fmt: skip
    header = ("target", "pattern", "on calibration data", "held out", "uniform, held out")
    return markdown(header, rows)


def _points(score: Mapping[str, float]) -> str:
    """Return percent right, and the difference from all F in points."""
    half = f" ± {100 * score['half_width']:.1f}" if score["half_width"] is not None else ""
    return f"{100 * score['accuracy']:.0f} ({100 * score['over_full']:+.1f}{half})"


def _interval(estimate: Mapping[str, float]) -> str:
    return f"{estimate['mean']:+.3f} ({estimate['low']:+.3f} to {estimate['high']:+.3f})"
