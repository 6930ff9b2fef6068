"""Rules of a search: the layers that may lose their indexer, and where the search ends."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from sglang_indexcache.errors import SearchError
from sglang_indexcache.pattern import Pattern

_RATIO = re.compile("([0-9]+)/([0-9]+)")
_LAYERS = re.compile("([0-9]+)(?:-([0-9]+))?")
_DEFAULT = ("1/2", "1/4", "1/8")


@dataclass(frozen=True)
class Constraints:
    """The rules of one search.

    Attributes:
        start: the pattern at which it begins, the checkpoint's own sharing.
        fixed: F layers that may not be flipped: layer 0 and the layers that a user keeps.
    """

    start: Pattern
    fixed: frozenset[int]

    @classmethod
    def make(cls, shipped: Pattern, keep_full: Iterable[int] = ()) -> Constraints:
        """Combine the rules; S layers of the checkpoint (``shipped``) have no indexer and stay S.

        Raises:
            SearchError: a layer does not exist, or has no indexer to keep.
        """
        full_layers = {0, *keep_full}
        if outside := sorted(layer for layer in full_layers if not 0 <= layer < len(shipped)):
            raise SearchError(f"layers {outside} do not exist in a {len(shipped)}-layer model")
        if missing := sorted(layer for layer in full_layers if not shipped.is_full(layer)):
            raise SearchError(
                f"layers {missing} are to stay F, but the checkpoint ships no indexer there"
            )
        return cls(shipped, frozenset(full_layers))

    @property
    def fewest(self) -> int:
        """F layers that no search can go below."""
        return len(self.fixed)

    def candidates(self, pattern: Pattern) -> list[int]:
        """Return the F layers of ``pattern`` that may become S, ascending."""
        return [layer for layer in pattern.full_layers if layer not in self.fixed]

    def restorable(self, pattern: Pattern) -> list[int]:
        """Return the S layers of ``pattern`` that may become F again, ascending."""
        return [layer for layer in pattern.shared_layers if self.start.is_full(layer)]

    def keeping(self, full_layers: Iterable[int]) -> Pattern:
        """Return the pattern that has these F layers."""
        return Pattern.from_layers(len(self.start), full_layers)

    def flipped(self, pattern: Pattern, layer: int) -> Pattern:
        """Exchange F and S of ``pattern`` at ``layer`` (the paper's ``c|_{c_l -> S}``)."""
        return self.keeping(set(pattern.full_layers) ^ {layer})


def uniform_within(full_layers: int, constraints: Constraints) -> Pattern | None:
    """Return the paper's interleaving with this many F layers, or None if the rules forbid it.

    If no ratio 1/r gives this count, F layers are spread as evenly as integers allow.
    """
    count = len(constraints.start)
    layers = {place * count // full_layers for place in range(full_layers)}
    for ratio in range(1, count + 1):
        pattern = Pattern.uniform(count, ratio)
        if len(pattern.full_layers) == full_layers:
            layers = set(pattern.full_layers)
            break
    allowed = constraints.fixed <= layers <= set(constraints.start.full_layers)
    return constraints.keeping(layers) if allowed else None


def parse_layers(text: str) -> list[int]:
    """Parse ``3,5,10-12`` as numbers.

    Raises:
        SearchError: the text has another form.
    """
    layers: list[int] = []
    for part in filter(None, text.split(",")):
        match = _LAYERS.fullmatch(part.strip())
        if match is None:
            raise SearchError(f"{text!r} is not a list of layers such as 3,5,10-12")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise SearchError(f"layers {part.strip()} go backwards; write {last}-{first}")
        layers += range(first, last + 1)
    return layers


@dataclass(frozen=True)
class Mark:
    """A retention at which the search writes a pattern; its label is, for instance, ``1/4``."""

    full_layers: int
    label: str


@dataclass(frozen=True)
class Targets:
    """Marks at which a search writes patterns, most F layers first, and the rules of the search."""

    constraints: Constraints
    marks: tuple[Mark, ...]

    @property
    def fewest(self) -> int:
        """F layers at which the search ends."""
        return self.marks[-1].full_layers

    def mark_at(self, full_layers: int) -> Mark | None:
        """Return the mark with exactly this many F layers."""
        return next((mark for mark in self.marks if mark.full_layers == full_layers), None)


def parse_targets(values: Sequence[str] | None, constraints: Constraints) -> Targets:
    """Parse the user's targets.

    Args:
        values: ratios (``1/4`` is a quarter of the layers, rounded up) or counts of F layers
            (``12``). None stands for those of 1/2, 1/4 and 1/8 that can be reached.

    Raises:
        SearchError: a value cannot be read or reached, or no default can.
    """
    total, available = len(constraints.start), len(constraints.start.full_layers)
    marks: dict[int, Mark] = {}
    for value in _DEFAULT if values is None else values:
        mark = _mark(value, total)
        if not constraints.fewest <= mark.full_layers <= available:
            if values is None:
                continue
            raise SearchError(
                f"target {value} keeps {mark.full_layers} of {total} indexers, but this search "
                f"can only reach {constraints.fewest} to {available} (layer 0 and the layers of "
                "--keep-full stay F; layers without an indexer in the checkpoint stay S)"
            )
        marks.setdefault(mark.full_layers, mark)
    if not marks:
        raise SearchError(
            "give at least one target (--target), such as 1/4 or 12: this search can reach "
            f"{constraints.fewest} to {available} of {total} indexers"
        )
    return Targets(constraints, tuple(sorted(marks.values(), key=lambda m: -m.full_layers)))


def _mark(value: str, total: int) -> Mark:
    if match := _RATIO.fullmatch(value):
        above, below = int(match[1]), int(match[2])
        if not 0 < above <= below:
            raise SearchError(f"target {value} is not a ratio between 0 and 1")
        return Mark(math.ceil(Fraction(above, below) * total), value)
    if value.isascii() and value.isdigit() and int(value) > 0:
        return Mark(int(value), f"{value}/{total}")
    raise SearchError(f"target {value!r} is neither a ratio (1/4) nor a count of F layers (12)")
