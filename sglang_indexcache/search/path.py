"""The way a search takes from all-F down: one pattern and its loss a step."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.evaluator import standard_error
from sglang_indexcache.search.ledger import Ledger


@dataclass(frozen=True)
class Step:
    """One committed flip (or the start, before any).

    Attributes:
        pattern: after the flip.
        layer: which layer became S; None for the start.
        loss: nats per token: the start's mean over all batches plus the mean increase over the
            start on the ``batches`` batches on which the pattern was measured. With all batches
            that is the pattern's mean; with fewer, the batches' different levels cancel.
        standard_error: of that increase; NaN for one batch.
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


def make_step(
    ledger: Ledger,
    start: Pattern,
    pattern: Pattern,
    layer: int | None,
    *,
    batches: int,
    candidates: int,
    decided: bool = True,
) -> Step:
    """Describe a committed pattern from what the ledger holds of it and of the start."""
    base = ledger.losses(start)
    increase = ledger.losses(pattern, ledger.all_batches[:batches]) - base[:batches]
    complete = batches == len(base)
    mean = ledger.mean(pattern) if complete else float(base.mean() + increase.mean())
    return Step(
        pattern=pattern,
        layer=layer,
        loss=mean,
        standard_error=standard_error(increase),
        batches=batches,
        candidates=candidates,
        spent=ledger.spent,
        decided=decided,
    )
