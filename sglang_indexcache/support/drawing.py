"""Draw a pattern: which layer serves which, for a terminal and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
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
    """A colour strip of the layers with a ruler, then a line for each run of groups of one size."""
    lines: list[RenderableType] = []
    if title:
        lines.append(Text(title, style="bold"))
    lines.append(Text(pattern.summary()))
    lines.append(Text())
    for start in range(0, len(pattern), _PER_LINE):
        stop = min(start + _PER_LINE, len(pattern))
        lines += [_ruler(start, stop), _strip(pattern, start, stop), Text()]
    sizes = enumerate(len(group.layers) for group in pattern.groups)
    for _, run in groupby(sizes, key=lambda numbered: numbered[1]):
        lines.append(_run_line(pattern, [number for number, _ in run]))
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


def _run_line(pattern: Pattern, numbers: Sequence[int]) -> Text:
    """What the F layers of neighbouring groups of one size serve."""
    groups = [pattern.groups[number] for number in numbers]
    first, last, alone = groups[0], groups[-1], len(groups) == 1
    followers = first.layers[1:]
    sources = f"{first.source:>3}" if alone else f"{first.source:>3} to {last.source}"
    text = Text("  ")
    text.append(f"F {sources}", style=f"bold {_color(numbers[0])}")
    if not followers:
        each = "serves itself only" if alone else "each serves itself only"
        text.append(f"  {each}", style="dim")
    elif not alone:
        behind = "layer" if len(followers) == 1 else f"{len(followers)} layers"
        text.append(f"  {len(groups)} F layers, each also serves the {behind} behind it")
    elif len(followers) == 1:
        text.append(f"  also serves {followers[0]}")
    else:
        text.append(f"  also serves {followers[0]}-{followers[-1]} ({len(followers)} layers)")
    return text


def to_image(patterns: Sequence[tuple[str, Pattern]], path: Path) -> None:
    """Draw patterns below each other, an arrow from every F layer to each layer it serves.

    Args:
        patterns: ``(title, pattern)`` pairs.
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
