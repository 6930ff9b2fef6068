"""Draw a pattern for a terminal: which layer serves which."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.console import Group as RichGroup
from rich.console import RenderableType
from rich.text import Text

from sglang_indexcache.library.lengths import counted
from sglang_indexcache.pattern import Pattern

_COLORS = ("cyan", "magenta", "green", "yellow", "blue", "red")
_PER_LINE = 60


def to_terminal(pattern: Pattern, title: str = "") -> RenderableType:
    """Draw the layers as a colour strip with a ruler, then a line for each run of equal groups."""
    lines: list[RenderableType] = []
    if title:
        lines.append(Text(title, style="bold"))
    lines.append(Text(pattern.summary()))
    lines.append(Text())
    for start in range(0, len(pattern), _PER_LINE):
        stop = min(start + _PER_LINE, len(pattern))
        lines += [_ruler(start, stop), _strip(pattern, start, stop), Text()]
    sizes = enumerate(map(len, pattern.groups))
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
        for layer in group:
            if start <= layer < stop:
                full = layer == group[0]
                style = f"bold reverse {_color(number)}" if full else _color(number)
                text.append(pattern.text[layer], style=style)
    return text


def _run_line(pattern: Pattern, numbers: Sequence[int]) -> Text:
    """Return a line that says which layers the F layers of neighbouring, equal groups serve."""
    groups = [pattern.groups[number] for number in numbers]
    first, last, alone = groups[0], groups[-1], len(groups) == 1
    sources = f"{first[0]:>3}" if alone else f"{first[0]:>3} to {last[0]}"
    text = Text("  ")
    text.append(f"F {sources}", style=f"bold {_color(numbers[0])}")
    prefix = "" if alone else "each "
    if followers := len(first) - 1:
        if not alone:
            prefix = f"in steps of {len(first)}, each "
        text.append(f"  {prefix}also serves the {counted(followers, 'layer')} behind it")
    else:
        text.append(f"  {prefix}serves itself only", style="dim")
    return text
