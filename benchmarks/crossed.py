"""The interval of a mean over runs and documents, where every run scored every document."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from sglang_indexcache.stats.bounds import student_quantile


def crossed_half_width(table: Sequence[Sequence[float]], confidence: float = 0.95) -> float | None:
    """Half the width of the interval of a mean over runs and documents, both drawn at random.

    Every run scored every document, so a document's difficulty and a run's luck each recur in a
    whole column or row. The variance is that of the runs' means plus that of the documents' means
    (the sandwich of two-way clustering without the term that they share, which makes it a little
    too large); Student's t takes its degrees of freedom from Welch and Satterthwaite. A single run
    leaves its own luck out.

    Args:
        table: ``[runs][documents]``.
        confidence: 0 to 1.

    Returns:
        None for fewer than two documents.
    """
    runs = [statistics.fmean(row) for row in table]
    documents = [statistics.fmean(column) for column in zip(*table, strict=True)]
    if len(documents) < 2:
        return None
    parts = [
        (statistics.variance(means) / len(means), len(means) - 1)
        for means in (runs, documents)
        if len(means) > 1
    ]
    total = sum(variance for variance, _ in parts)
    if total == 0:
        return 0.0
    freedom = total**2 / sum(variance**2 / free for variance, free in parts)
    return float(student_quantile((1 + confidence) / 2, freedom) * total**0.5)
