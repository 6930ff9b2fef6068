"""Figures: matplotlib is set up and pictures are written in one way everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang_indexcache.errors import SettingsError
from sglang_indexcache.support.files import replacing


def make_figure(
    width: float, height: float, rows: int = 1, columns: int = 1, **shared: Any
) -> tuple[Any, list[Any]]:
    """A matplotlib figure without a window, and its axes in reading order.

    Args:
        width: inches.
        height: inches.
        rows: of axes.
        columns: of axes.
        shared: ``sharex`` and ``sharey`` as for ``Figure.subplots``.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False, **shared).flat)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save_figure(figure: Any, path: Path) -> None:
    """Write a PNG; a viewer that watches the file never sees half of it.

    Raises:
        SettingsError: the name of another kind of file.
    """
    if path.suffix != ".png":
        raise SettingsError(f"pictures are written as PNG; give {path} the suffix .png")
    with replacing(path) as part:
        figure.savefig(part, dpi=150, format="png")


def check_installed() -> None:
    """Before long work whose figures come last.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    import matplotlib.figure  # noqa: F401
