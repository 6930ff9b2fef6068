"""Beam search beside a known path: keep several patterns at every retention, not only one."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_indexcache.errors import SearchError
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.constraints import Constraints, flipped
from sglang_indexcache.search.ledger import Known, Ledger


@dataclass(frozen=True)
class Beam:
    """:func:`beam` as a row of :data:`~sglang_indexcache.search.refinements.REFINEMENTS`.

    Attributes:
        width: patterns kept at every level.

    Raises:
        SearchError: a width below 1.
    """

    width: int = 4
    in_words = "beam refinement"

    def __post_init__(self) -> None:
        if self.width < 1:
            raise SearchError(f"the beam must be at least 1 wide, got {self.width}")

    def refine(
        self, ledger: Ledger, constraints: Constraints, pattern: Pattern, known: Known, budget: int
    ) -> tuple[Pattern, int]:
        """See :class:`~sglang_indexcache.search.refinements.Refinement`."""
        best = beam(ledger, constraints, min(known), self.width, known)
        return best[len(pattern.full_layers)], 0

    def tokens(self, budget: int) -> None:
        """See :class:`~sglang_indexcache.search.refinements.Refinement`."""


def beam(
    ledger: Ledger, constraints: Constraints, fewest: int, width: int, known: Known
) -> dict[int, Pattern]:
    """Search downwards with ``width`` patterns at every number of F layers.

    Each level holds the ``width`` best of all flips of the level above and of the known pattern
    of that level, so no level's best is ever worse than the known pattern.

    Args:
        ledger: measures and remembers.
        constraints: which layers may be flipped.
        fewest: F layers at which to end.
        width: patterns kept at every level.
        known: another search's patterns, for example greedy's path.

    Returns:
        The best pattern by its number of F layers.
    """
    level = [constraints.start]
    best = {len(constraints.start.full_layers): constraints.start}
    for count in range(len(constraints.start.full_layers) - 1, fewest - 1, -1):
        found = [
            flipped(pattern, layer)
            for pattern in level
            for layer in constraints.candidates(pattern)
        ]
        if count in known:
            found.append(known[count])
        unique = list(dict.fromkeys(found))
        means = ledger.many(unique).mean(axis=1)
        order = means.argsort(kind="stable")[:width]
        level = [unique[int(i)] for i in order]
        best[count] = level[0]
    return best
