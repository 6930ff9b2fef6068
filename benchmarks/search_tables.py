"""The tables of benchmarks/results/search/README.md, each made from the results beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_indexcache.bench.tables import Grid

_TASKS = ("needles", "recall", "interleaved", "prose")
_LOSSES = ("all", "late", "answers")
_RANKED = (*_LOSSES, "kl")
_METHODS = {"greedy": "greedy", "fast, refined": "fast"}


def landscapes(folder: Path, path: str) -> str:
    """What searches on made-up landscapes add on fresh batches, relative to exhaustive greedy."""
    found = _read(folder, path)
    names = ("fast", "forward", "fast, 10x batches", "exhaustive, 3 batches")
    rows = []
    for kind, summary in found["summary"].items():
        cells = [summary["searches"][name]["over_exhaustive"] for name in names]
        rows.append((kind, *(" ".join(f"{v:.2f}" for v in cell.values()) for cell in cells)))
    title = f"{found['layers']} layers, {len(found['seeds'])} landscapes of each kind"
    return Grid(title, ("", *names), tuple(rows)).to_markdown()


def races(folder: Path, path: str) -> str:
    """How often a race on made-up losses misses the best on all batches."""
    rows = _read(folder, path)["rows"]
    counts = sorted({row["contenders"] for row in rows})
    wrong: dict[tuple[str, str], list[str]] = {}
    for row in sorted(rows, key=lambda row: row["contenders"]):
        place = row["damage"], f"{row['first_batches']} batches"
        wrong.setdefault(place, []).append(f"{100 * row['share_wrong']:.0f} %")
    header = ("damage", "first look", *(f"{count} candidates" for count in counts))
    return Grid("", header, tuple((*k, *cells) for k, cells in wrong.items())).to_markdown()


def levels(folder: Path, path: str) -> str:
    """The study's tasks: what all F gets right, and who guesses."""
    rows = []
    for setting in _read(folder, path)["settings"]:
        length = str(setting["length"])
        full = next(p for p in setting["patterns"] if p["because"] == "all F")["held_out"]
        right = [f"{100 * full[task]['accuracy']:.0f}" for task in _TASKS]
        rows.append((length, "all F, % right", *right))
        guessed = [f"{100 * setting['chance'][task]:.0f}" for task in _TASKS]
        rows.append((length, "chance, %", *guessed))
    return Grid("", ("tokens", "", *_TASKS), tuple(rows)).to_markdown()


def searched(folder: Path, path: str) -> str:
    """What the study's searches found; not at 6 F where selections are starved."""
    rows = []
    for setting in _read(folder, path)["settings"]:
        known = {p["pattern"]: p["held_out"] for p in setting["patterns"]}
        counts = (3, 2) if setting["name"] == "starved" else (6, 3, 2)
        for count in counts:
            for pattern, by in _found_by(setting["descents"], count).items():
                cells = [_points(known[pattern][task]) for task in _TASKS]
                rows.append((str(setting["length"]), str(count), by, f"`{pattern}`", *cells))
    header = ("tokens", "F", "found by", "pattern", *_TASKS)
    return Grid("", header, tuple(rows)).to_markdown()


def _found_by(descents: Mapping[str, Any], count: int) -> dict[str, str]:
    """By pattern the methods and objectives that arrived at it."""
    found: dict[str, dict[str, list[str]]] = {}
    for method, name in _METHODS.items():
        for objective in _LOSSES:
            pattern = descents[method][objective][str(count)]
            found.setdefault(pattern, {}).setdefault(name, []).append(objective)
    return {
        pattern: "; ".join(f"{name} on {', '.join(on)}" for name, on in by.items())
        for pattern, by in found.items()
    }


def ranks(folder: Path, path: str) -> str:
    """How the study's objectives rank patterns."""
    rows = []
    for setting in _read(folder, path)["settings"]:
        for count, found in setting["correlation"].items():
            for objective in _RANKED:
                by_task = found[objective]
                mean = by_task["mean of four"]
                rows.append(
                    (
                        str(setting["length"]),
                        f"{count} F, {found['patterns']}",
                        f"`{objective}`",
                        *(f"{by_task[task]['rho']:.2f}" for task in _TASKS),
                        f"{mean['rho']:.2f} ({mean['low']:.2f} to {mean['high']:+.2f})",
                    )
                )
    header = ("tokens", "patterns", "objective", *_TASKS, "mean of four")
    return Grid("", header, tuple(rows)).to_markdown()


def served(folder: Path, path: str) -> str:
    """What searches over HTTP found on each objective, and held-out answers right."""
    found = _read(folder, path)
    full = found["full"]["tasks"]
    right = [f"{100 * full[task]['accuracy']:.0f}" for task in _TASKS]
    rows = [("12", "all F", f"`{found['full']['pattern']}`", *right)]
    counts = list(next(iter(found["found"].values())))
    for count in counts:
        by: dict[str, list[str]] = {}
        for name, marks in found["found"].items():
            by.setdefault(marks[count]["pattern"], []).append(name)
        for pattern, names in by.items():
            tasks = found["found"][names[0]][count]["tasks"]
            cells = [_points(tasks[task]) for task in _TASKS]
            rows.append((count, ", ".join(names), f"`{pattern}`", *cells))
    return Grid("", ("F", "found by", "pattern", *_TASKS), tuple(rows)).to_markdown()


def shipped(folder: Path, path: str) -> str:
    """The shipped checkpoint's patterns: their calibration loss, and held out against all F."""
    search, compared = (
        _read(folder, f"{path}/answers/search.json"),
        _read(folder, f"{path}/compare.json"),
    )
    held_out = {row["pattern"]: row["difference"] for row in compared["comparisons"]}
    rows = []
    for mark in search["marks"]:
        blind = mark["baselines"]["uniform"]
        rows.append(
            (
                mark["retention"],
                f"`{mark['pattern']}`",
                f"{mark['loss'] - search['start']['loss']:+.3f}",
                _interval(held_out[mark["pattern"]]),
                _interval(held_out[blind["pattern"]]),
            )
        )  # fmt: skip
    header = ("target", "pattern", "on calibration data", "held out", "uniform, held out")
    return Grid("", header, tuple(rows)).to_markdown()


def _points(found: Mapping[str, float]) -> str:
    """Percent right, and the difference from all F in points."""
    half = f" ± {100 * found['half_width']:.1f}" if found["half_width"] is not None else ""
    return f"{100 * found['accuracy']:.0f} ({100 * found['over_full']:+.1f}{half})"


def _interval(found: Mapping[str, float]) -> str:
    return f"{found['mean']:+.3f} ({found['low']:+.3f} to {found['high']:+.3f})"


def _read(folder: Path, path: str) -> Any:
    return json.loads((folder / path).read_text(encoding="utf-8"))
