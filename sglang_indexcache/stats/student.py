"""Student's t: how far a mean of few values can be trusted."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any


def student_quantile(probability: float, freedom: Any) -> Any:
    """The value that Student's t with ``freedom`` degrees of freedom stays below so often.

    Args:
        probability: 0 to 1; 0.975 bounds a two-sided interval of 95 %.
        freedom: above 0; a number, or an array of them.
    """
    from scipy.special import stdtrit  # scipy.stats takes half a second to import

    return stdtrit(freedom, probability)


def half_width(values: Iterable[float], confidence: float = 0.95) -> float | None:
    """Half the width of the two-sided interval of the mean; None for fewer than two values.

    Args:
        values: independent, roughly normal.
        confidence: 0 to 1.
    """
    found = [float(value) for value in values]
    if len(found) < 2:
        return None
    error: float = statistics.stdev(found) / len(found) ** 0.5
    return float(student_quantile((1 + confidence) / 2, len(found) - 1)) * error
