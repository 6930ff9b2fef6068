"""What a recent window gives back of what sharing loses, by ``indexcache eval``.

    python -m benchmarks.recent_window WORK_FOLDER {eval,losses} [--until HH:MM]
    python -m benchmarks.recent_window WORK_FOLDER report [--publish]

Each setting (how long a list, how long a text) is one evaluation of the small checkpoint: patterns
with and without windows against all F, on the same documents. ``eval`` asks questions of a server
on the CPU platform (``indexcache eval run``); ``losses`` measures the loss of held-out text in
transformers (``indexcache search compare``), which is much cheaper and says less. Both run the
commands that users have and compute no statistic of their own. Started again they go on where they
were; the report tells of the settings that are finished, in result.json and window.png.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import sglang_indexcache
from benchmarks.records import markdown, read_arguments
from sglang_indexcache.ask.launch import Server
from sglang_indexcache.study.plots import BLUE, FULL, GREEN, RED, make_figure, save_figure
from sglang_indexcache.study.provenance import machine
from sglang_indexcache.support.files import write_json

TINY = Path(sglang_indexcache.__file__).parent / "demo" / "tiny-dsa"
WINDOWS = (0, 4, 8, 16)
BLIND = tuple(f"uniform:1/{ratio}" for ratio in (2, 4, 3, 6))
SEARCHED = ("1/4", "1/8")
ALL_FULL = "full"
POINTS = "points to all F"
NATS = "thousandths of a nat a token over all F"
TRAINED_FOR = 512
"""Tokens: the length of the texts that the small checkpoint was trained on."""
COLUMNS = 4
"""Panels side by side."""
MARKS = {0: "o", 4: "v", 8: "s", 16: "D"}
COLORS = {0: FULL, 4: GREEN, 8: BLUE, 16: RED}
"""Both of each window, in the figure."""

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
SHORT = (*with_windows((*BLIND, *SEARCHED), (0, 8)), *CONTROL)
LONG = (*with_windows((*BLIND[:2], SEARCHED[0]), (0, 8)), *CONTROL)
WIDTHS = with_windows(BLIND[:2], (4, 16))
ENOUGH = 96
"""Contexts that can show "no loss beyond 5 points"."""
# Lists of 16 are too short to hold a question, which eval's control needs.
SETTINGS = (
    Setting(64, 256, ENOUGH, SHORT),
    Setting(64, 512, ENOUGH, SHORT),
    Setting(64, 512, ENOUGH, WIDTHS, "b"),
    Setting(256, 512, ENOUGH, SHORT),
    Setting(256, 1024, ENOUGH, LONG),
    Setting(32, 256, ENOUGH, SHORT),
    Setting(64, 1024, ENOUGH, LONG),
    Setting(256, 2048, 32, LONG),
    Setting(32, 512, ENOUGH, SHORT),
    Setting(64, 2048, 32, LONG),
    Setting(256, 1024, ENOUGH, WIDTHS, "b"),
)
"""In the order in which they are run; what does not fit the time is not measured."""


def with_lists(folder: Path, topk: int) -> Path:
    """The small checkpoint with lists of another length: a config beside links to its files."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in TINY.iterdir():
        if file.name != "config.json" and not (folder / file.name).exists():
            (folder / file.name).symlink_to(file.resolve())
    config = json.loads((TINY / "config.json").read_text())
    write_json(folder / "config.json", config | {"index_topk": topk})
    return folder


def indexcache(*arguments: str | Path | int) -> None:
    """Run one of our commands."""
    line = [sys.executable, "-m", "sglang_indexcache.cli", *map(str, arguments)]
    subprocess.run(line, check=True)


def run(setting: Setting, work: Path) -> None:
    """Serve the checkpoint in live mode and evaluate every arm on it, unless that is done."""
    if result(setting, work):
        return
    model = with_lists(work / f"tiny-dsa-top{setting.topk}", setting.topk)
    flags = ["--dtype", "float32", "--indexcache-mode", "live", "--max-total-tokens", "65536"]
    command = ["--model-path", str(model), "--attention-backend", "indexcache", *flags]
    with Server(command, work / f"{setting.name}.log") as server:
        server.wait_until_ready()
        indexcache(
            *("eval", "run", *setting.arms, "--task", "notes", "--length", setting.length),
            *("--model", model, "--url", f"http://127.0.0.1:{server.port}"),
            *("--contexts", setting.contexts, "--looks", 3, "--margin", 5, "--yes"),
            *("--output", work / setting.name),
        )


LOSSES = (
    (64, 512),
    (16, 512),
    (256, 512),
    (64, 256),
    (16, 256),
    (256, 1024),
    (64, 1024),
    (64, 2048),
)
"""List and text, in the order in which they are run."""
COMPARED = (ALL_FULL, *with_windows(BLIND[:2], (0, 8)), *CONTROL)


def compare(topk: int, length: int, work: Path) -> None:
    """The loss of all patterns on eight held-out documents; the objective is the command's own."""
    model = with_lists(work / f"tiny-dsa-top{topk}", topk)
    output = work / f"loss-top{topk}-{length}"
    if (output / "compare.json").exists():
        return
    options = ("--model", model, "--context", length, "--held-out", 8, "--output", output)
    indexcache("search", "compare", *COMPARED, *options)


def losses(work: Path) -> list[Cell]:
    """What the comparisons that are finished say, in thousandths of a nat a token."""
    told = []
    for topk, length in LOSSES:
        path = work / f"loss-top{topk}-{length}" / "compare.json"
        for one in json.loads(path.read_text())["comparisons"] if path.exists() else ():
            pattern, _, window = one["name"].partition("+w")
            found = one["difference"]
            told.append(
                {
                    "topk": topk,
                    "length": length,
                    "pattern": pattern,
                    "window": int(window or 0),
                    "reference": one["reference_loss"],
                    "difference": 1000 * found["mean"],
                    "interval": [1000 * found["low"], 1000 * found["high"]],
                }
            )
    return told


def result(setting: Setting, work: Path) -> dict[str, Any]:
    """What a finished evaluation wrote; nothing of one that is not."""
    path = work / setting.name / "eval.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found if found.get("finished") else {}


def cells(setting: Setting, found: dict[str, Any]) -> list[Cell]:
    """Each arm of a finished evaluation, in its own words and numbers, in points."""
    told = []
    for verdict in found["verdicts"]:
        pattern, _, window = verdict["pattern"].partition("+w")
        around, difference, levels = (
            verdict[name] for name in ("interval", "difference", "levels")
        )
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
                "interval": None if around is None else [100 * end for end in around],
            }
        )
    return told


def report(work: Path, output: Path, command: str) -> None:
    """Record and figure of the finished settings."""
    found: list[Cell] = []
    commits = set()
    for setting in SETTINGS:
        if data := result(setting, work):
            found += cells(setting, data)
            commits.add(data["facts"]["commit"])
    told = {
        "command": command,
        "machine": machine(),
        "commits": sorted(commits),
        "cells": found,
        "losses": losses(work),
    }
    output.mkdir(parents=True, exist_ok=True)
    write_json(output / "result.json", told)
    draw(told, output / "window.png")


def groups(found: list[Cell]) -> dict[tuple[int, int], list[Cell]]:
    """The cells of each setting, the shortest texts and lists first."""
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


def draw(told: dict[str, Any], path: Path) -> None:
    """A panel for each pattern and measure, a line for each setting, a mark for each window.

    Of the losses only those of texts as long as the model was trained for: beyond, all F itself
    goes wrong, and every other pattern looks better than it is.
    """
    trained_for = [cell for cell in told["losses"] if cell["length"] <= TRAINED_FOR]
    panels = [
        (unit, pattern, [cell for cell in found if cell["pattern"] == pattern])
        for unit, found in ((POINTS, told["cells"]), (NATS, trained_for))
        for pattern in dict.fromkeys(cell["pattern"] for cell in found)
        if pattern != ALL_FULL
    ]
    rows, columns = -(-len(panels) // COLUMNS), min(COLUMNS, len(panels))
    figure, axes = make_figure(3.6 * columns, 3.2 * rows + 0.4, rows=rows, columns=columns)
    settings = {
        unit: list(groups([cell for other, _, some in panels if other == unit for cell in some]))
        for unit, _, _ in panels
    }
    most = max(map(len, settings.values()))
    labels: dict[str, Any] = {}
    for number, (axis, (unit, pattern, some)) in enumerate(zip(axes, panels, strict=False)):
        labels |= _panel(axis, some, settings[unit])
        axis.set_ylim(most - 0.5, -0.5)  # the same height for each setting everywhere
        axis.set_title(f"{TINY.name}, {pattern}", fontsize=9, loc="left")
        axis.set_xlabel(unit, fontsize=8)
        ends = [end for other, _, found in panels if other == unit for end in _ends(found)]
        margin = 0.05 * (max(ends) - min(ends))
        axis.set_xlim(min(*ends, 0) - margin, max(*ends, 0) + margin)
        if number % columns and panels[number - 1][0] == unit:
            axis.tick_params(labelleft=False)
        else:
            axis.set_ylabel("tokens selected, of how many", fontsize=8)
    for axis in axes[len(panels) :]:
        axis.remove()
    figure.legend(
        [labels[name] for name in sorted(labels, key=_window_of)],
        sorted(labels, key=_window_of),
        loc="outside lower center", ncols=len(labels), frameon=False, fontsize=8,
    )  # fmt: skip
    save_figure(figure, path)


def _window_of(label: str) -> int:
    return int(label.rpartition(" ")[2]) if label.startswith("window of") else 0


def _ends(found: list[Cell]) -> list[float]:
    return [end for cell in found for end in cell["interval"] or ()]


def _panel(axis: Any, some: list[Cell], settings: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """One pattern: how far it is from all F in each setting, by window; the legend's entries."""
    axis.axvline(0, color="black", lw=0.8)
    windows = sorted({cell["window"] for cell in some})
    labels = {}
    for cell in (cell for cell in some if cell["interval"]):
        window, at, (low, high) = cell["window"], cell["difference"], cell["interval"]
        place = windows.index(window) - (len(windows) - 1) / 2
        label = f"window of {window}" if window else "no window"
        labels[label] = axis.errorbar(
            at,
            settings.index((cell["topk"], cell["length"])) + 0.16 * place,
            xerr=[[at - low], [high - at]],
            fmt=MARKS[window],
            color=COLORS[window],
            markersize=5,
            capsize=2,
        )
    axis.set_yticks(range(len(settings)), [f"{topk} of {length}" for topk, length in settings])
    return labels


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("what", choices=("eval", "losses", "report"))
    parser.add_argument("--until", default="", help="HH:MM; no setting begins after it")
    parser.add_argument("--settings", type=int, default=len(LOSSES), help="only the first so many")
    arguments = read_arguments(parser, "window", quick={"settings": 1})
    work, count = arguments.work, arguments.settings
    steps: list[Callable[[], None]] = []
    if arguments.what == "eval":
        steps = [partial(run, setting, work) for setting in SETTINGS[:count]]
    if arguments.what == "losses":
        steps = [partial(compare, topk, length, work) for topk, length in LOSSES[:count]]
    for step in steps:
        if arguments.until and time.strftime("%H:%M") >= arguments.until:
            break
        step()
    report(work, arguments.output, arguments.command)


if __name__ == "__main__":
    main()
