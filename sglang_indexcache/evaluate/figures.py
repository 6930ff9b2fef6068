"""The pictures of a report: each a pure function of a summary, and left out if it has no data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sglang_indexcache.evaluate.evaluation import Evaluation, Role
from sglang_indexcache.evaluate.summary import (
    DEPTHS,
    NOISE,
    ONE_LOOK,
    Level,
    PlacedDifference,
    Summary,
)
from sglang_indexcache.evaluate.verdict import Kind, points
from sglang_indexcache.study.plots import make_figure, save_figure
from sglang_indexcache.support.lengths import format_length

_COLOURS = ("#1f5fa8", "#c9711a", "#2c8a4b", "#8d5fb0", "#b5476d", "#4a9aa5")
_REFERENCE, _BAD, _NOISE, _MARGIN = "#333333", "#9a9a9a", "#d5d5d5", "#c0392b"
_LOST, _WON = "#c0392b", "#2c8a4b"
_WIDTH = 7.6


def draw_all(evaluation: Evaluation, summary: Summary, folder: Path) -> dict[str, Path]:
    """Write every picture that has data; by name, in reading order."""
    found = {}
    for name, draw in PICTURES.items():
        figure = draw(evaluation, summary)
        path = folder / f"{name}.png"
        path.unlink(missing_ok=True)
        if figure is not None:
            save_figure(figure, path)
            found[name] = path
    return found


def forest(evaluation: Evaluation, summary: Summary) -> Any:
    """Differences by task and length, one panel a pattern, with the margin and the A/A band."""
    arms = [arm.name for arm in evaluation.candidates]
    places = sorted({(row.task, row.length) for row in summary.cells})
    if not places or not arms:
        return None
    blind = {cell for _, verdict in summary.verdicts.values() for cell in verdict.blind}
    figure, axes = make_figure(
        _WIDTH, 1.5 + 0.27 * len(places), columns=len(arms), sharex=True, sharey=True
    )
    for axis, arm, colour in zip(axes, arms, _colours(len(arms)), strict=True):
        rows = {(row.task, row.length): row for row in summary.cells if row.arm == arm}
        axis.axvline(0, color="black", lw=0.8)
        axis.axvline(-100 * evaluation.margin, color=_MARGIN, lw=1, ls="--", label="margin")
        for height, place in enumerate(places):
            if place in rows:
                _band(axis, summary.flicker, rows[place].contexts, height)
                _bar(axis, rows[place], height, _BAD if place in blind else colour)
        axis.set_title(arm, fontsize=9, loc="left")
        axis.set_xlabel("difference, points", fontsize=8)
        axis.tick_params(labelsize=8)
    axes[0].set_yticks(range(len(places)), [_place(*place) for place in places])
    axes[0].set_ylim(len(places) - 0.4, -0.6)
    handles, labels = axes[0].get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))  # the band has one for each row
    figure.legend(
        once.values(), once.keys(), loc="outside lower center", ncols=2, fontsize=8, frameon=False
    )
    return figure


def by_length(evaluation: Evaluation, summary: Summary) -> Any:
    """Right answers against length, and beside them the divergence from the reference."""
    panels: list[tuple[str, Sequence[Level], float]] = [
        ("right answers, %", summary.rights, 100.0),
        ("KL from the reference, nats", summary.kl, 1.0),
    ]
    panels = [panel for panel in panels if any(level.length for level in panel[1])]
    if not panels:
        return None
    figure, axes = make_figure(_WIDTH, 3.0, columns=len(panels))
    lengths = sorted({level.length for _, levels, _ in panels for level in levels})
    for axis, (label, levels, scale) in zip(axes, panels, strict=True):
        for name, style in _styles(evaluation).items():
            line = [level for level in levels if level.arm == name]
            if line:
                where = [lengths.index(level.length) for level in line]
                axis.plot(where, [scale * level.mean for level in line], **style, label=name)
        axis.set_xticks(range(len(lengths)), [format_length(length) for length in lengths])
        axis.set_xlim(-0.3, len(lengths) - 0.7)
        axis.set_xlabel("length, tokens", fontsize=8)
        axis.set_title(label, fontsize=9, loc="left")
        axis.set_ylim(bottom=0)
        axis.tick_params(labelsize=8)
        axis.margins(y=0.1)
        if levels is summary.rights:
            axis.set_ylim(0, 104)
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside right center", fontsize=7, frameon=False
    )
    return figure


def lost_and_won(_evaluation: Evaluation, summary: Summary) -> Any:
    """Questions lost and won by each arm, beside those that the reference flips by itself."""
    totals: dict[str, list[int]] = {}
    for row in summary.cells:
        parts = (row.flips.lost, row.flips.won, row.flips.pairs)
        before = totals.get(row.arm, [0, 0, 0])
        totals[row.arm] = [old + new for old, new in zip(before, parts, strict=True)]
    if not totals:
        return None
    figure, [axis] = make_figure(_WIDTH, 0.9 + 0.42 * len(totals))
    most = max(max(lost, won) / pairs for lost, won, pairs in totals.values()) or 0.01
    for height, (lost, won, pairs) in enumerate(totals.values()):
        for count, side, colour in ((lost, -1, _LOST), (won, 1, _WON)):
            share = 100 * count / pairs
            axis.barh(height, side * share, color=colour, height=0.6)
            axis.annotate(
                f"{count:,}", (side * share, height), xytext=(4 * side, 0), va="center",
                textcoords="offset points", ha="left" if side > 0 else "right", fontsize=8,
            )  # fmt: skip
    labels = [f"{arm}\n{pairs:,} pairs" for arm, (_, _, pairs) in totals.items()]
    axis.set_yticks(range(len(totals)), labels, fontsize=8)
    axis.invert_yaxis()
    axis.axvline(0, color="black", lw=0.8)
    axis.set_xlim(-125 * most, 125 * most)
    axis.xaxis.set_major_formatter(lambda value, _: f"{abs(value):g}")
    axis.set_xlabel("lost (left) and won (right), % of pairs", fontsize=8)
    axis.tick_params(labelsize=8)
    return figure


def depth(evaluation: Evaluation, summary: Summary) -> Any:
    """Where in the context an answer lay, by length: what each pattern adds there."""
    spots = [spot for spot in summary.spots if spot.length]
    arms = [arm.name for arm in evaluation.candidates if any(s.arm == arm.name for s in spots)]
    if not arms or len({spot.depth for spot in spots}) < 2:  # logs of others do not tell
        return None
    scale, unit, digits = 100.0, "difference, points", 1
    if summary.spots_are_nats:
        scale, unit, digits = 1.0, "added nats per answer token", 2
    lengths = sorted({spot.length for spot in spots})
    most = max(abs(scale * spot.mean) for spot in spots) or 1e-3
    figure, axes = make_figure(_WIDTH, 2.6, columns=len(arms), sharey=True)
    colours = "RdBu_r" if summary.spots_are_nats else "RdBu"
    for axis, arm in zip(axes, arms, strict=True):
        grid = np.full((DEPTHS, len(lengths)), np.nan)
        for spot in spots:
            if spot.arm == arm:
                grid[spot.depth, lengths.index(spot.length)] = scale * spot.mean
        image = axis.imshow(grid, cmap=colours, vmin=-most, vmax=most, aspect="auto")
        for (row, column), value in np.ndenumerate(grid):
            if np.isfinite(value):
                ink = "white" if abs(value) > 0.6 * most else "black"
                axis.text(
                    column,
                    row,
                    f"{value:+.{digits}f}",
                    ha="center",
                    va="center",
                    fontsize=7,
                    color=ink,
                )
        axis.set_xticks(range(len(lengths)), [format_length(length) for length in lengths])
        axis.set_title(arm, fontsize=9, loc="left")
        axis.set_xlabel("length, tokens", fontsize=8)
        axis.tick_params(labelsize=8)
    step = 100 // DEPTHS
    axes[0].set_yticks(range(DEPTHS), [f"{step * i}-{step * (i + 1)} %" for i in range(DEPTHS)])
    axes[0].set_ylabel("depth of the answer", fontsize=8)
    bar = figure.colorbar(image, ax=axes, fraction=0.04, pad=0.02)
    bar.set_label(unit, fontsize=8)
    bar.ax.tick_params(labelsize=7)
    return figure


def looks(evaluation: Evaluation, summary: Summary) -> Any:
    """How strong each claim was at each look, and the boundaries of all planned ones.

    A line ends at the look that decided, ringed where that was by this claim.
    """
    design = evaluation.design
    arms = [arm.name for arm in evaluation.candidates]
    if not summary.steps or design.looks < 2:
        return None
    figure, axes = make_figure(_WIDTH, 2.8, columns=2, sharey=True)
    every = range(1, design.looks + 1)
    top = max(design.bounds[0], 4.5) + 0.3
    titles = {"no_loss": f"no loss beyond {points(design.margin)}", "loss": "a loss"}
    for axis, (claim, title) in zip(axes, titles.items(), strict=True):
        axis.plot(every, design.bounds, color=_MARGIN, lw=1.2, ls="--", label="needed")
        for label, fill in (("look taken", _MARGIN), ("not taken", "white")):
            marks = [look for look in every if (look <= evaluation.look) is (fill == _MARGIN)]
            if marks:
                needed = [design.bounds[look - 1] for look in marks]
                axis.plot(marks, needed, "D", ms=4, color=_MARGIN, mfc=fill, label=label)
        for arm, colour in zip(arms, _colours(len(arms)), strict=True):
            line = [step for step in summary.steps if step.arm == arm]
            heights = np.clip([getattr(step, claim) for step in line], -3, top - 0.1)
            axis.plot([step.look for step in line], heights, color=colour, marker="o", ms=4,
                      lw=1.2, label=arm)  # fmt: skip
            if line and summary.verdicts[arm][1].kind in (Kind[claim.upper()], Kind.SMALL_LOSS):
                axis.plot(line[-1].look, heights[-1], color=colour, marker="o", ms=10, mfc="none")
        axis.axhline(0, color="black", lw=0.8, ls=":")
        axis.set_ylim(-3.2, top)
        axis.set_xticks(list(every))
        axis.set_xlabel("look", fontsize=8)
        axis.set_title(f"evidence for: {title}", fontsize=9, loc="left")
        axis.tick_params(labelsize=8)
    axes[0].set_ylabel("standard normal value", fontsize=8)
    axes[-1].legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


Picture = Callable[[Evaluation, Summary], Any]
PICTURES: dict[str, Picture] = {
    "forest": forest,
    "length": by_length,
    "flips": lost_and_won,
    "depth": depth,
    "looks": looks,
}


def _colours(count: int) -> list[str]:
    return [_COLOURS[number % len(_COLOURS)] for number in range(count)]


def _styles(evaluation: Evaluation) -> dict[str, dict[str, Any]]:
    """How each arm is drawn against length; the reference and controls stand back."""
    found: dict[str, dict[str, Any]] = {}
    colours = iter(_colours(len(evaluation.arms)))
    for arm in evaluation.arms:
        if arm.role is Role.CANDIDATE:
            found[arm.name] = {"color": next(colours), "marker": "o", "ms": 4, "lw": 1.3}
        elif arm.role is Role.BAD:
            found[arm.name] = {"color": _BAD, "marker": "x", "ms": 4, "lw": 1, "ls": "--"}
        else:
            found[arm.name] = {"color": _REFERENCE, "marker": "o", "ms": 4, "lw": 1.3}
    found[NOISE] = {"color": _REFERENCE, "marker": ".", "ms": 4, "lw": 0.8, "ls": ":"}
    return found


def _band(axis: Any, flicker: float | None, contexts: int, height: int) -> None:
    """How far the engine's own flips alone move a mean over so many contexts, 90 % of the time."""
    if flicker is not None:
        half = 100 * ONE_LOOK * flicker / contexts**0.5
        axis.barh(height, 2 * half, left=-half, height=0.7, color=_NOISE, zorder=0, label="A/A")


def _bar(axis: Any, row: PlacedDifference, height: int, colour: str) -> None:
    low, high = (100 * float(np.clip(bound, -1, 1)) for bound in (row.low, row.high))
    axis.plot([low, high], [height, height], color=colour, lw=1.6, solid_capstyle="butt")
    axis.plot(100 * row.mean, height, color=colour, marker="o", ms=4.5)


def _place(task: str, length: int) -> str:
    return f"{task} {format_length(length)}" if length else task
