"""Drawing of a matrix of layer pairs, with the blocks of a pattern on it."""

from __future__ import annotations

from pathlib import Path
from textwrap import fill

import numpy as np

from sglang_indexcache.lab.runs.plots import make_figure, save_figure
from sglang_indexcache.lab.stats.pairs import Floats
from sglang_indexcache.pattern import Pattern


def draw_pairs(
    matrix: Floats,
    path: Path,
    pattern: Pattern | None = None,
    label: str = "share of the selection in common",
) -> None:
    """Draw a heatmap of ``[N, N]`` with the pattern's blocks on it (paper, appendix).

    ``label`` says what an entry from 0 to 1 means.
    """
    from matplotlib.patches import Rectangle

    count = len(matrix)
    size = min(9.0, 3.6 + 0.09 * count)
    figure, [axis] = make_figure(size + 0.6, size * 0.86)
    empty = np.triu(matrix == 0, 1)  # a matrix of pairs has only its lower half
    image = axis.imshow(
        np.where(empty, np.nan, matrix), cmap="viridis", vmin=0, vmax=1, origin="lower"
    )
    bar = figure.colorbar(image, ax=axis, fraction=0.045, pad=0.03)
    bar.set_label(fill(label, 46), fontsize=9)  # a longer line would exceed the figure
    for group in pattern.groups if pattern else ():
        corner = (group[0] - 0.5, group[0] - 0.5)
        side = len(group)
        box = Rectangle(corner, side, side, fill=False, edgecolor="#ff4d3d", lw=1.6, clip_on=False)
        axis.add_patch(box)
    interval = 1 if count <= 16 else 5
    axis.set_xticks(range(0, count, interval))
    axis.set_yticks(range(0, count, interval))
    axis.tick_params(labelsize=8)
    axis.set_xlabel("layer that selects" if empty.any() else "layer")
    axis.set_ylabel("layer that takes its list" if empty.any() else "layer")
    if pattern is not None:
        axis.set_title("boxes: layers that share one selection", fontsize=9, loc="left")
    save_figure(figure, path)
