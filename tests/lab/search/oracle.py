"""Independent transcriptions of the paper's algorithms: plain loops over plain strings."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

Loss = Callable[[str], float]


def algorithm_1(count: int, loss: Loss, flips: int) -> list[str]:
    """Algorithm 1 line by line (layers from 0): the pattern after every step."""
    c = ["F"] * count
    r = set(range(1, count))
    trace = []
    for _ in range(flips):
        best_layer, best_loss = None, float("inf")
        for layer in sorted(r):
            candidate = c.copy()
            candidate[layer] = "S"
            value = loss("".join(candidate))
            if value < best_loss:
                best_layer, best_loss = layer, value
        assert best_layer is not None
        c[best_layer] = "S"
        r.remove(best_layer)
        trace.append("".join(c))
    return trace


def every_pattern(count: int, full: int) -> list[str]:
    """Return all patterns of ``count`` layers with ``full`` F, layer 0 among them."""
    patterns = []
    for layers in combinations(range(1, count), full - 1):
        positions = {0, *layers}
        patterns.append("".join("F" if i in positions else "S" for i in range(count)))
    return patterns


def source(pattern: str, layer: int) -> int:
    """Return ``max{j < l : c_j = F}``, or the layer itself where it is F."""
    while pattern[layer] == "S":
        layer -= 1
    return layer
