"""The paper's two search figures from our numbers, and the curve along the context."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np

from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.compare import Comparison
from sglang_indexcache.search.evaluators import Floats
from sglang_indexcache.search.run import Found, Search
from sglang_indexcache.study.plots import make_figure, save_figure

_LABEL = 46
"""Characters of an axis label's line, in the height of a figure."""
_LINE, _MARK, _HELD_OUT, _BLIND = "#1f5fa8", "#c0392b", "#2c8a4b", "#8a8a8a"


def draw_losses(search: Search, path: Path, objective: str = "") -> None:
    """Loss after each flip with the retentions marked (paper, figure beside Algorithm 1).

    The band is two standard errors of the increase over the start. A racing search measures most
    steps on few batches and keeps the lowest, so its line runs a little low between the marks; the
    marks themselves are measured on all batches. What a mark's pattern adds on held-out batches is
    drawn over the same start. ``objective`` says which tokens' loss it is.
    """
    figure, [axis] = make_figure(6.4, 3.8)
    start = len(search.constraints.start.full_layers)
    # A search may also walk upwards: the line follows the layers shared, not the time.
    walked = sorted(search.path, key=lambda step: -len(step.pattern.full_layers))
    steps = [start - len(step.pattern.full_layers) for step in walked]
    axis.plot(steps, [s.loss for s in walked], color=_LINE, lw=1.4, marker="o", ms=2.5)
    low = [s.loss - 2 * np.nan_to_num(s.standard_error) for s in walked]
    high = [s.loss + 2 * np.nan_to_num(s.standard_error) for s in walked]
    axis.fill_between(steps, low, high, color=_LINE, alpha=0.13, lw=0)
    axis.axhline(search.start_loss, color="black", lw=0.8, ls=":", label="no layer shared")
    for number, found in enumerate(search.found.values()):
        _draw_mark(axis, search, found, start - found.mark.full_layers, is_first=number == 0)
    axis.set_xlabel("layers turned from F to S")
    axis.set_ylabel(_of("loss", objective), fontsize=8)
    axis.set_title(search.in_words(), fontsize=9, loc="left")
    axis.legend(fontsize=8, frameon=False, loc="upper left")
    axis.ticklabel_format(axis="y", useOffset=False)
    axis.margins(y=0.12)
    save_figure(figure, path)


def _draw_mark(axis: Any, search: Search, found: Found, step: int, *, is_first: bool) -> None:
    axis.axvline(step, color=_MARK, lw=0.6, alpha=0.35)
    label = "pattern found" if is_first else None
    axis.plot(step, found.loss, color=_MARK, marker="D", ms=5, ls="none", label=label, zorder=4)
    axis.annotate(
        found.mark.label,
        (step, 0.0),
        xycoords=("data", "axes fraction"),
        xytext=(3, 4),
        textcoords="offset points",
        color=_MARK,
        fontsize=9,
    )
    if held_out := found.held_out:
        label = "pattern found, held out (95 %)" if is_first else None
        loss = search.start_loss + held_out.added
        axis.errorbar(
            step + 0.12, loss, held_out.half, color=_HELD_OUT, marker="o", ms=4, capsize=3, lw=1,
            label=label, zorder=5,
        )  # fmt: skip
    if "uniform" in found.baselines:
        label = "uniform interleaving" if is_first else None
        loss = found.baselines["uniform"][1]
        axis.plot(step, loss, color=_BLIND, marker="s", ms=4.5, ls="none", label=label, zorder=3)


def draw_overlap(matrix: Floats, path: Path, pattern: Pattern | None = None) -> None:
    """Heatmap of ``[N, N]`` overlap, the pattern's blocks drawn on it (paper, appendix)."""
    from matplotlib.patches import Rectangle

    count = len(matrix)
    size = min(9.0, 3.6 + 0.09 * count)
    figure, [axis] = make_figure(size, size * 0.86)
    image = axis.imshow(matrix, cmap="viridis", vmin=0, vmax=1, origin="lower")
    bar = figure.colorbar(image, ax=axis, fraction=0.045, pad=0.03)
    bar.set_label("share of the selection in common", fontsize=9)
    for group in pattern.groups if pattern else ():
        corner = (group.layers[0] - 0.5, group.layers[0] - 0.5)
        side = len(group.layers)
        box = Rectangle(corner, side, side, fill=False, edgecolor="#ff4d3d", lw=1.6, clip_on=False)
        axis.add_patch(box)
    every = 1 if count <= 16 else 5
    axis.set_xticks(range(0, count, every))
    axis.set_yticks(range(0, count, every))
    axis.tick_params(labelsize=8)
    axis.set_xlabel("layer")
    axis.set_ylabel("layer")
    if pattern is not None:
        axis.set_title("boxes: layers that share one selection", fontsize=9, loc="left")
    save_figure(figure, path)


def draw_comparison(
    comparisons: Sequence[tuple[str, Comparison]], path: Path, objective: str = ""
) -> None:
    """Loss difference along the context, one line a pattern with its 95 % band."""
    figure, [axis] = make_figure(6.4, 3.6)
    for name, found in comparisons:
        known = [
            (a, b, d) for (a, b), d in zip(pairwise(found.edges), found.curve, strict=True) if d
        ]
        middles = [(a + b) / 2 for a, b, _ in known]
        [line] = axis.plot(middles, [d.mean for *_, d in known], marker="o", ms=3, label=name)
        low, high = [d.low for *_, d in known], [d.high for *_, d in known]
        axis.fill_between(middles, low, high, color=line.get_color(), alpha=0.15, lw=0)
    axis.axhline(0, color="black", lw=0.8, ls=":")
    axis.set_xlabel("position in the context, tokens")
    axis.set_ylabel(_of("loss difference", objective), fontsize=8)
    axis.set_title(f"against {_short(comparisons[0][1].reference)}", fontsize=9, loc="left")
    axis.legend(fontsize=8, frameon=False)
    save_figure(figure, path)


def _of(quantity: str, objective: str) -> str:
    """An axis label that says which tokens count."""
    which = f" of {objective}" if objective else ""
    return fill(f"{quantity}{which}, nats per token", _LABEL)


def _short(pattern: Pattern) -> str:
    return pattern.summary() if pattern.shared_layers else "every layer F"
