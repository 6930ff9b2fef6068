"""Figures: one place that sets up matplotlib and writes pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang_indexcache.errors import SettingsError
from sglang_indexcache.library.writing import replacing
from sglang_indexcache.pattern import Pattern

FORMATS: dict[str, dict[str, None]] = {
    ".png": {},
    ".pdf": {"CreationDate": None},
    ".svg": {"Date": None},
}
"""Formats of pictures by suffix, with the metadata to leave out, so that equal figures give equal
files."""
_WRITING = {"svg.hashsalt": "indexcache", "pdf.fonttype": 42, "ps.fonttype": 42}
"""Settings for writing. TrueType fonts, because conferences and journals refuse matplotlib's Type
3."""
FULL = "#8a8a8a"
BLUE, RED, GREEN = "#1f5fa8", "#c0392b", "#2e8b57"
"""Colours for figures in which colours do not stand for patterns."""
_SEARCHED = ((0.4, BLUE), (0.2, RED), (0.0, GREEN))
_UNIFORM = ((0.4, "#8db8e0"), (0.2, "#e8a79f"), (0.0, "#9ccfb2"))
"""Smallest shares of F layers for about 1/2, 1/4 and 1/8, with the paler colours of uniform
patterns."""


def pattern_color(pattern: Pattern) -> str:
    """Return a pattern's colour in every figure, from its retention and kind."""
    if not pattern.shared_layers:
        return FULL
    first, second, *_ = (*pattern.full_layers, len(pattern))
    is_uniform = pattern == Pattern.uniform(len(pattern), second - first)
    share = len(pattern.full_layers) / len(pattern)
    return next(color for least, color in (_UNIFORM if is_uniform else _SEARCHED) if share >= least)


def make_figure(
    width: float, height: float, rows: int = 1, columns: int = 1, **shared: Any
) -> tuple[Any, list[Any]]:
    """Make a matplotlib figure in inches, without a window, and its axes in reading order.

    ``shared`` has ``sharex`` and ``sharey`` as for ``Figure.subplots``.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False, **shared).flat)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save_figure(figure: Any, path: Path) -> None:
    """Write a picture in the format of its suffix, in one step, so that no viewer sees half of it.

    Raises:
        SettingsError: the suffix is not in :data:`FORMATS`.
    """
    if path.suffix not in FORMATS:
        raise SettingsError(f"pictures are written as {', '.join(FORMATS)}, got {path}")
    from matplotlib import rc_context

    with replacing(path) as part, rc_context(_WRITING):
        figure.savefig(part, dpi=150, format=path.suffix[1:], metadata=FORMATS[path.suffix])


def check_installed() -> None:
    """Refuse a missing plot library before long work that ends with figures.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    import matplotlib.figure  # noqa: F401
