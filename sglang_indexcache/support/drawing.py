"""Draw a pattern: which layer serves which, for a terminal and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Group as RichGroup
from rich.console import RenderableType
from rich.text import Text

from sglang_indexcache.pattern import Pattern
from sglang_indexcache.study.plots import make_figure, save_figure

_COLORS = ("cyan", "magenta", "green", "yellow", "blue", "red")
_PER_LINE = 60


def to_terminal(pattern: Pattern, title: str = "") -> RenderableType:
    """A colour strip of the layers with a ruler, then one line per group."""
    lines: list[RenderableType] = []
    if title:
        lines.append(Text(title, style="bold"))
    lines.append(Text(pattern.summary()))
    lines.append(Text())
    for start in range(0, len(pattern), _PER_LINE):
        stop = min(start + _PER_LINE, len(pattern))
        lines += [_ruler(start, stop), _strip(pattern, start, stop), Text()]
    lines += [_group_line(pattern, number) for number in range(len(pattern.groups))]
    return RichGroup(*lines)


def _color(number: int) -> str:
    return _COLORS[number % len(_COLORS)]


def _ruler(start: int, stop: int) -> Text:
    text = ""
    for layer in range(start, stop):
        if len(text) <= layer - start:
            text += str(layer) if layer % 10 == 0 else " "
    return Text("layer  " + text[: stop - start + 2], style="dim")


def _strip(pattern: Pattern, start: int, stop: int) -> Text:
    text = Text("       ")
    for number, group in enumerate(pattern.groups):
        for layer in group.layers:
            if start <= layer < stop:
                full = layer == group.source
                style = f"bold reverse {_color(number)}" if full else _color(number)
                text.append("F" if full else "S", style=style)
    return text


def _group_line(pattern: Pattern, number: int) -> Text:
    group = pattern.groups[number]
    text = Text("  ")
    text.append(f"F {group.source:>3}", style=f"bold {_color(number)}")
    followers = group.layers[1:]
    if not followers:
        text.append("  serves itself only", style="dim")
    elif len(followers) == 1:
        text.append(f"  also serves {followers[0]}")
    else:
        text.append(f"  also serves {followers[0]}-{followers[-1]} ({len(followers)} layers)")
    return text


def to_image(patterns: Sequence[tuple[str, Pattern]], path: Path) -> None:
    """Draw patterns below each other, an arrow from every F layer to each layer it serves.

    Args:
        patterns: ``(title, pattern)`` pairs.
        path: a .png file.
    """
    longest = max(len(pattern) for _, pattern in patterns)
    size = max(6.0, 0.24 * longest + 0.8), 1.9 * len(patterns)
    figure, axes = make_figure(*size, rows=len(patterns))
    for axis, (title, pattern) in zip(axes, patterns, strict=True):
        _draw(axis, title, pattern, longest)
    save_figure(figure, path)


def _draw(axis: Any, title: str, pattern: Pattern, longest: int) -> None:
    from matplotlib import colormaps
    from matplotlib.patches import FancyArrowPatch, Rectangle

    palette = colormaps["tab10"]
    for number, group in enumerate(pattern.groups):
        color = palette(number % 10)
        for layer in group.layers:
            full = layer == group.source
            axis.add_patch(
                Rectangle(
                    (layer - 0.42, 0), 0.84, 0.84, facecolor=color, alpha=1.0 if full else 0.25
                )
            )
            axis.text(
                layer,
                0.42,
                "F" if full else "S",
                ha="center",
                va="center",
                fontsize=8,
                color="white" if full else "black",
                fontweight="bold" if full else "normal",
            )
            if not full:
                axis.add_patch(
                    FancyArrowPatch(
                        (group.source, 0.9),
                        (layer, 0.9),
                        connectionstyle="arc3,rad=-0.35",
                        arrowstyle="-|>",
                        mutation_scale=6,
                        linewidth=0.8,
                        color=color,
                    )
                )
    axis.set_xlim(-1, longest)
    axis.set_ylim(-0.2, 3.2)
    axis.set_xticks(range(0, len(pattern), 5))
    axis.tick_params(axis="x", length=2, labelsize=7)
    axis.set_yticks([])
    axis.spines["left"].set_visible(False)
    axis.set_xlabel("layer", fontsize=8)
    axis.set_title(
        f"{title}: {pattern.summary()}" if title else pattern.summary(), fontsize=9, loc="left"
    )
