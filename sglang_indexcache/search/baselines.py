"""Patterns that need no search: uniform interleaving and upstream's frequency schedule."""

from __future__ import annotations

from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.constraints import Constraints


def baselines(full_layers: int, constraints: Constraints) -> dict[str, Pattern]:
    """The blind schedules with this many F layers that the constraints allow, by name.

    ``uniform`` is the paper's interleaving where a ratio 1/r gives this count, and the F layers
    spread as evenly as integers allow otherwise. ``freq`` is SGLang's ``index_topk_freq`` without
    an offset, where some frequency gives this count.
    """
    count = len(constraints.start)
    found = {"uniform": _spread(count, full_layers)}
    for freq in range(1, count + 1):
        pattern = Pattern.uniform(count, freq)
        if len(pattern.full_layers) == full_layers:
            found["uniform"] = pattern
            break
    for freq in range(1, count + 1):
        pattern = Pattern.from_freq(count, freq)
        if len(pattern.full_layers) == full_layers:
            found["freq"] = pattern
            break
    return {name: pattern for name, pattern in found.items() if _is_allowed(pattern, constraints)}


def _spread(count: int, full_layers: int) -> Pattern:
    return Pattern.from_layers(count, (i * count // full_layers for i in range(full_layers)))


def _is_allowed(pattern: Pattern, constraints: Constraints) -> bool:
    full = set(pattern.full_layers)
    return full <= set(constraints.start.full_layers) and constraints.fixed <= full
