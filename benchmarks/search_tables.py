"""The tables of benchmarks/results/search/README.md, each made from the results beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.records import RESULTS, markdown

Record = Mapping[str, Any]

_TASKS = ("needles", "recall", "interleaved", "prose")
_LOSSES = ("all", "late", "answers")
_RANKED = (*_LOSSES, "kl")
_METHODS = {"greedy": "greedy", "fast, refined": "fast"}


def landscapes(found: Record) -> str:
    """Write what searches on made-up landscapes add on fresh batches, beside exhaustive greedy."""
    return _landscapes(found, ("fast", "forward", "fast, 10x batches", "exhaustive, 3 batches"))


def _landscapes(found: Record, names: Sequence[str]) -> str:
    rows = []
    for kind, summary in found["summary"].items():
        cells = [summary["searches"][name]["over_exhaustive"] for name in names]
        rows.append((kind, *(" ".join(f"{v:.2f}" for v in cell.values()) for cell in cells)))
    title = f"{found['layers']} layers, {len(found['seeds'])} landscapes of each kind"
    return markdown(("", *names), rows, title)


def starts(found: Record) -> str:
    """Write the same of ``both`` with and without a first pattern from one pass."""
    names = [name for name in found["rows"][0]["searches"] if name.startswith("both")]
    return _landscapes(found, names)


def races(found: Record) -> str:
    """Write how often a race on made-up losses misses the best on all batches."""
    rows = found["rows"]
    counts = sorted({row["contenders"] for row in rows})
    wrong: dict[tuple[str, str], list[str]] = {}
    for row in sorted(rows, key=lambda row: row["contenders"]):
        place = row["damage"], f"{row['first_batches']} batches"
        wrong.setdefault(place, []).append(f"{100 * row['share_wrong']:.0f} %")
    header = ("damage", "first look", *(f"{count} candidates" for count in counts))
    return markdown(header, [(*k, *cells) for k, cells in wrong.items()])


def intervals(found: Record) -> str:
    """Tabulate how often Student's interval and ours cover a loss, by number of documents."""
    worlds = {f"made up: {name}": row for name, row in found["made_up"].items()}
    worlds |= {f"shipped: `{name}`": row for name, row in found["shipped"].items()}
    worlds |= {
        f"found on landscapes: {name}": row["documents"] for name, row in found["searched"].items()
    }
    counts = list(found["unseen_share"])
    rows = []
    for name, row in worlds.items():
        cells = []
        for count in counts:
            student, ours = (row[count][kind]["covers"] for kind in ("student", "ours"))
            cells.append(f"{100 * student:.0f} → {100 * ours:.0f}")
        rows.append((name, *cells))
    title = f"Covers, % of {found['runs']:,} runs (landscapes: a twentieth): Student's → ours"
    return markdown(("", *(f"{count} documents" for count in counts)), rows, title)


def worst(found: Record) -> str:
    """Tabulate what our interval covers with and without the two documents that lose most."""
    rows = []
    for name, row in found["shipped_worst"].items():
        cells = [
            f"{100 * cell['hold_none']:.0f} %: {100 * cell['covers_without']:.0f}; "
            f"{100 * cell['covers_with']:.0f}"
            for cell in row.values()
        ]
        rows.append((f"`{name}`", *cells))
    counts = next(iter(found["shipped_worst"].values()))
    title = "Runs without the two worst documents: covers, % of these; of the others"
    return markdown(("", *(f"{count} documents" for count in counts)), rows, title)


def unlikely(found: Record) -> str:
    """Tabulate how often `search compare` called the true loss unlikely."""
    shares = found["called_unlikely"]
    rows = []
    for share, row in shares.items():
        cells = [f"{100 * cell['student']:.0f} → {100 * cell['ours']:.0f}" for cell in row.values()]
        rows.append((f"true loss {100 * float(share):g} %", *cells))
    counts = next(iter(shares.values()))
    title = "Called unlikely and true, % of runs: before → now"
    return markdown(("", *(f"{count} documents" for count in counts)), rows, title)


def levels(found: Record) -> str:
    """Write the study's tasks: what all F gets right, and who guesses."""
    rows = []
    for setting in found["settings"]:
        length = str(setting["length"])
        full = next(p for p in setting["patterns"] if p["because"] == "all F")["held_out"]
        right = [f"{100 * full[task]['accuracy']:.0f}" for task in _TASKS]
        rows.append((length, "all F, % right", *right))
        guessed = [f"{100 * setting['chance'][task]:.0f}" for task in _TASKS]
        rows.append((length, "chance, %", *guessed))
    return markdown(("tokens", "", *_TASKS), rows)


def searched(found: Record) -> str:
    """Write what the study's searches found; not at 6 F where selections are starved."""
    rows = []
    for setting in found["settings"]:
        known = {p["pattern"]: p["held_out"] for p in setting["patterns"]}
        counts = (3, 2) if setting["name"] == "starved" else (6, 3, 2)
        for count in counts:
            for pattern, by in _found_by(setting["descents"], count).items():
                cells = [_points(known[pattern][task]) for task in _TASKS]
                rows.append((str(setting["length"]), str(count), by, f"`{pattern}`", *cells))
    header = ("tokens", "F", "found by", "pattern", *_TASKS)
    return markdown(header, rows)


def _found_by(descents: Mapping[str, Any], count: int) -> dict[str, str]:
    """Return the methods and objectives that arrived at each pattern."""
    found: dict[str, dict[str, list[str]]] = {}
    for method, name in _METHODS.items():
        for objective in _LOSSES:
            pattern = descents[method][objective][str(count)]
            found.setdefault(pattern, {}).setdefault(name, []).append(objective)
    return {
        pattern: "; ".join(f"{name} on {', '.join(on)}" for name, on in by.items())
        for pattern, by in found.items()
    }


def ranks(found: Record) -> str:
    """Write how the study's objectives rank patterns."""
    rows = []
    for setting in found["settings"]:
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


def served(found: Record) -> str:
    """Write what searches over HTTP found on each objective, and held-out answers right."""
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
    return markdown(("F", "found by", "pattern", *_TASKS), rows)


def shipped(found: Record) -> str:
    """Write the shipped checkpoint's patterns: calibration loss, and held out against all F."""
    compared = json.loads((RESULTS / "search/tiny-dsa/compare.json").read_text(encoding="utf-8"))
    held_out = {row["pattern"]: row["difference"] for row in compared["comparisons"]}
    rows = []
    for mark in found["marks"]:
        blind = mark["baselines"]["uniform"]
        rows.append(
            (
                mark["retention"],
                f"`{mark['pattern']}`",
                f"{mark['loss'] - found['start']['loss']:+.3f}",
                _interval(held_out[mark["pattern"]]),
                _interval(held_out[blind["pattern"]]),
            )
        )  # fmt: skip
    header = ("target", "pattern", "on calibration data", "held out", "uniform, held out")
    return markdown(header, rows)


def _points(found: Mapping[str, float]) -> str:
    """Percent right, and the difference from all F in points."""
    half = f" ± {100 * found['half_width']:.1f}" if found["half_width"] is not None else ""
    return f"{100 * found['accuracy']:.0f} ({100 * found['over_full']:+.1f}{half})"


def _interval(found: Mapping[str, float]) -> str:
    return f"{found['mean']:+.3f} ({found['low']:+.3f} to {found['high']:+.3f})"
