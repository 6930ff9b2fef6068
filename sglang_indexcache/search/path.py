"""The way a search takes from all-F down: one pattern and its loss a step."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_indexcache.pattern import Pattern


@dataclass(frozen=True)
class Step:
    """One committed flip (or the start, before any).

    Attributes:
        pattern: after the flip.
        layer: which layer became S; None for the start.
        loss: mean calibration loss in nats per token, over ``batches`` batches.
        standard_error: of ``loss``; NaN for one batch.
        batches: how many of the batches were measured (a racing search may stop early).
        candidates: patterns that were compared.
        spent: tokens asked for since the search began.
        decided: whether the data told the best candidate from the others; a racing search that
            runs out of its allowance commits the leader and says False.
    """

    pattern: Pattern
    layer: int | None
    loss: float
    standard_error: float
    batches: int
    candidates: int
    spent: int
    decided: bool = True
