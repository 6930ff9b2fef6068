"""The figures of the recent window's studies, from their records (see window_tables.py)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.kernels.unions import TINY, TRAINED_FOR
from benchmarks.window_tables import Cell, groups
from sglang_indexcache.study.plots import BLUE, FULL, GREEN, RED, make_figure, save_figure

ALL_FULL = "full"
POINTS = "points to all F"
NATS = "thousandths of a nat a token over all F"
COLUMNS = 4
"""Panels side by side."""
MARKS = {0: "o", 4: "v", 8: "s", 16: "D"}
COLORS = {0: FULL, 4: GREEN, 8: BLUE, 16: RED}
"""Both of each window, in the figure."""
WINDOW = 8
BLIND = "uniform:1/4"


def given_back(told: dict[str, Any], path: Path) -> None:
    """Draw a panel for each pattern and measure, a line for each setting, a mark for each window.

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


def searches(told: dict[str, Any], path: Path) -> None:
    """Left: what patterns add, by F layers. Right: what uniform 1/4 adds, by steps of healing."""
    figure, (left, right) = make_figure(10.4, 4.6, columns=2, sharey=True)
    counts = sorted({one["pattern"].count("F") for one in told["searches"]})
    hows = {"searched with w = 0": RED, f"searched with w = {WINDOW}": BLUE, "uniform": FULL}
    for place, (how, color) in enumerate(hows.items()):
        for window in (0, WINDOW):
            line = [o for o in told["searches"] if (o["how"], o["window"]) == (how, window)]
            line.sort(key=lambda one: one["pattern"].count("F"))
            places = [counts.index(one["pattern"].count("F")) + 0.08 * (place - 1) for one in line]
            label = f"{how}, served with w = {window}"
            _line(left, places, line, window, color, label).set_linestyle("-" if window else "--")
    left.set_xticks(range(len(counts)), [str(count) for count in counts])
    left.set_xlabel("F layers, of 12")
    left.set_ylabel("thousandths of a nat a token over all F")
    steps = sorted({one["steps"] for one in told["healings"]})
    for window, color in ((0, RED), (WINDOW, BLUE)):
        line = [one for one in told["healings"] if one["window"] == window]
        places = [steps.index(one["steps"]) for one in line]
        label = f"{BLIND}, served with w = {window}"
        _line(right, places, line, window, color, label).set_linestyle("none")
    right.set_xticks(range(len(steps)), [str(one) for one in steps])
    right.set_xlim(-0.5, len(steps) - 0.5)
    right.set_xlabel("steps of healing; bars: 95 %")
    for axis in (left, right):
        axis.axhline(0, color="black", lw=0.8, ls=":")
        axis.legend(
            fontsize=7, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2
        )
    left.set_yscale("symlog", linthresh=20)
    ticks = (-10, 0, 10, 20, 50, 100, 200, 500)
    left.set_yticks(ticks, [str(tick) for tick in ticks])
    left.minorticks_off()
    lowest = min(one["interval"][0] for one in [*told["searches"], *told["healings"]])
    left.set_ylim(lowest - 2, 650)
    save_figure(figure, path)


def _line(
    axis: Any,
    places: Sequence[float],
    line: Sequence[dict[str, Any]],
    window: int,
    color: str,
    label: str,
) -> Any:
    """Draw differences with their intervals; hollow without a window. Return the line."""
    values = [one["difference"] for one in line]
    low = [one["difference"] - one["interval"][0] for one in line]
    high = [one["interval"][1] - one["difference"] for one in line]
    drawn = axis.errorbar(
        places, values, yerr=[low, high], color=color, marker="o", ms=4, capsize=2, lw=1.2,
        markerfacecolor=color if window else "white", label=label,
    )  # fmt: skip
    return drawn[0]
