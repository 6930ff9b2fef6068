"""Beam search beside a known path: keep several patterns at every retention, not only one."""

from __future__ import annotations

from collections.abc import Mapping

from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.constraints import Constraints, flipped
from sglang_indexcache.search.ledger import Ledger


def beam(
    ledger: Ledger,
    constraints: Constraints,
    fewest: int,
    width: int,
    known: Mapping[int, Pattern],
) -> dict[int, Pattern]:
    """Search downwards with ``width`` patterns at every number of F layers.

    Each level holds the ``width`` best of all flips of the level above and of the known pattern
    of that level, so no level's best is ever worse than the known pattern.

    Args:
        ledger: measures and remembers.
        constraints: which layers may be flipped.
        fewest: F layers at which to end.
        width: patterns kept at every level.
        known: another search's pattern by its number of F layers, for example greedy's path.

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
