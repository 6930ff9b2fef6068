"""What a recent window gives back of what sharing loses, by ``indexcache eval``.

    python -m benchmarks.recent_window WORK_FOLDER [--until HH:MM]
    python -m benchmarks.recent_window WORK_FOLDER --report

Each setting (how long a list, how long a text) is one evaluation of the small checkpoint on the CPU
platform: all patterns with every window against all F, on the same contexts. It runs the command
that users have and computes no statistic of its own. Started again it goes on where it was; the
report tells of the settings that are finished. Writes
results/window/{result.json, table.md, window.png}.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sglang_indexcache
from sglang_indexcache.ask.launch import Server
from sglang_indexcache.study.plots import make_figure, save_figure
from sglang_indexcache.study.provenance import machine
from sglang_indexcache.support.files import write_json, write_whole

RESULTS = Path(__file__).parent / "results" / "window"
TINY = Path(sglang_indexcache.__file__).parent / "demo" / "tiny-dsa"
WINDOWS = (0, 4, 8, 16)
BLIND = tuple(f"uniform:1/{ratio}" for ratio in (2, 4, 3, 6))
SEARCHED = ("1/4", "1/8")
ALL_FULL = "full"

Cell = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """One evaluation.

    Attributes:
        topk: tokens that an F layer selects.
        length: of the contexts, tokens.
        contexts: how many.
        arms: patterns, each with its window.
        part: a letter, where a list and a length have several evaluations.
    """

    topk: int
    length: int
    contexts: int
    arms: tuple[str, ...]
    part: str = ""

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"top{self.topk}-{self.length}{self.part}"


def with_windows(patterns: tuple[str, ...], windows: tuple[int, ...]) -> tuple[str, ...]:
    """Every pattern with every window."""
    return tuple(f"{one}+w{w}" if w else one for one in patterns for w in windows)


CONTROL = (f"{ALL_FULL}+w8",)
SETTINGS = (
    Setting(64, 256, 24, (*with_windows(BLIND[:2], (0, 8)), *CONTROL)),
    Setting(64, 512, 24, (*with_windows(BLIND[:2], (0, 8)), *CONTROL)),
    Setting(64, 256, 24, with_windows(BLIND[:2], (4, 16)), "b"),
    Setting(64, 256, 24, (*with_windows(BLIND[2:], (0, 8)), *with_windows(SEARCHED, (0, 8))), "c"),
    Setting(256, 1024, 16, (*with_windows(BLIND[:2], (0, 8)), *CONTROL)),
    Setting(64, 1024, 16, with_windows(BLIND[:2], (0, 8))),
    Setting(32, 256, 24, (*with_windows(BLIND[:2], (0, 8)), *CONTROL)),
    Setting(64, 2048, 8, with_windows(BLIND[:2], (0, 8))),
)
"""In the order in which they are run; what does not fit the time is not measured."""


def checkpoint(folder: Path, topk: int) -> Path:
    """The small checkpoint with lists of another length: a config beside links to its files."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in TINY.iterdir():
        if file.name != "config.json" and not (folder / file.name).exists():
            (folder / file.name).symlink_to(file.resolve())
    config = json.loads((TINY / "config.json").read_text())
    write_json(folder / "config.json", config | {"index_topk": topk})
    return folder


def run(setting: Setting, work: Path) -> None:
    """Serve the checkpoint in live mode and evaluate every arm on it."""
    model = checkpoint(work / f"tiny-dsa-top{setting.topk}", setting.topk)
    flags = ["--dtype", "float32", "--indexcache-mode", "live", "--max-total-tokens", "65536"]
    command = ["--model-path", str(model), "--attention-backend", "indexcache", *flags]
    with Server(command, work / f"{setting.name}.log") as server:
        server.wait_until_ready()
        subprocess.run(
            [
                *(sys.executable, "-m", "sglang_indexcache.cli", "eval", "run", *setting.arms),
                *("--model", str(model), "--url", f"http://127.0.0.1:{server.port}"),
                *("--task", "notes", "--length", str(setting.length)),
                *("--contexts", str(setting.contexts)),
                *("--looks", "3", "--margin", "5", "--yes", "--output", str(work / setting.name)),
            ],
            check=True,
        )


def cells(setting: Setting, found: dict[str, Any]) -> list[Cell]:
    """Each arm of a finished evaluation, in its own words and numbers, in points."""
    told = []
    for verdict in found["verdicts"]:
        pattern, _, window = verdict["pattern"].partition("+w")
        low, high = verdict["interval"] or (None, None)
        difference, levels = verdict["difference"], verdict["levels"]
        told.append(
            {
                "topk": setting.topk,
                "length": setting.length,
                "contexts": found["design"]["contexts"],
                "pattern": pattern,
                "window": int(window or 0),
                "verdict": verdict["kind"],
                "reference": None if levels is None else 100 * levels[0],
                "difference": None if difference is None else 100 * difference,
                "interval": None if low is None else [100 * low, 100 * high],
            }
        )
    return told


def report(work: Path) -> None:
    """Table and figure of the finished settings."""
    found: list[Cell] = []
    commits = set()
    for setting in SETTINGS:
        path = work / setting.name / "eval.json"
        if path.exists() and (data := json.loads(path.read_text()))["finished"]:
            found += cells(setting, data)
            commits.add(data["facts"]["commit"])
    RESULTS.mkdir(parents=True, exist_ok=True)
    told = {"machine": machine(), "commits": sorted(commits), "cells": found}
    write_json(RESULTS / "result.json", told)
    write_whole(RESULTS / "table.md", table(found))
    draw(found, RESULTS / "window.png")


def groups(found: list[Cell]) -> dict[tuple[int, int], list[Cell]]:
    """The cells of each setting; those of one list and one text stand together."""
    by: dict[tuple[int, int], list[Cell]] = {}
    for cell in found:
        by.setdefault((cell["topk"], cell["length"]), []).append(cell)
    return by


def table(found: list[Cell]) -> str:
    """Markdown: a row for a setting and pattern, a column for a window."""
    head = ["list", "tokens", "contexts", "all F", "pattern", *(f"w = {w}" for w in WINDOWS)]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for (topk, length), some in groups(found).items():
        for pattern in dict.fromkeys(cell["pattern"] for cell in some):
            row = {cell["window"]: cell for cell in some if cell["pattern"] == pattern}
            any_one = next(iter(row.values()))
            texts = [_points(row.get(window)) for window in WINDOWS]
            level = any_one["reference"]
            about = (topk, length, any_one["contexts"], "" if level is None else f"{level:.0f} %")
            lines.append("| " + " | ".join(map(str, (*about, pattern, *texts))) + " |")
    return "\n".join(lines) + "\n"


def _points(cell: Cell | None) -> str:
    if cell is None:
        return ""
    around = cell["interval"]
    return f"{cell['difference']:+.1f}" + (
        f" ({around[0]:+.1f} to {around[1]:+.1f})" if around else ""
    )


def draw(found: list[Cell], path: Path) -> None:
    """A panel for each setting: points lost over the window, a line for each pattern."""
    some = groups(found)
    figure, axes = make_figure(7.0, 2.6 * len(some), rows=len(some))
    for axis, ((topk, length), cells_here) in zip(axes, some.items(), strict=True):
        axis.axhline(0, color="black", lw=0.8)
        for place, pattern in enumerate(dict.fromkeys(cell["pattern"] for cell in cells_here)):
            mine = [
                cell
                for cell in cells_here
                if cell["pattern"] == pattern and cell["difference"] is not None
            ]
            values = [cell["difference"] for cell in mine]
            ends = list(zip(*(cell["interval"] for cell in mine), strict=True))
            bars = [[abs(v - e) for v, e in zip(values, end, strict=True)] for end in ends]
            at = [cell["window"] + 0.15 * place for cell in mine]
            axis.errorbar(at, values, yerr=bars or None, marker="o", ms=4, capsize=2, label=pattern)
        axis.set_xticks(WINDOWS)
        axis.set_title(f"lists of {topk} of {length} tokens", fontsize=9, loc="left")
        axis.set_ylabel("points to all F", fontsize=8)
        axis.legend(fontsize=7, loc="lower right")
    axes[-1].set_xlabel("recent window, tokens", fontsize=8)
    save_figure(figure, path)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--until", default="", help="HH:MM; no setting begins after it")
    parser.add_argument("--report", action="store_true", help="only write what is finished")
    arguments = parser.parse_args()
    if not arguments.report:
        for setting in SETTINGS:
            if arguments.until and time.strftime("%H:%M") >= arguments.until:
                break
            run(setting, arguments.work)
    report(arguments.work)


if __name__ == "__main__":
    main()
