"""Better than greedy at the same retention: exchange an F layer for an S layer while it helps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.ledger import Ledger
from sglang_indexcache.search.methods.fast import least_subset
from sglang_indexcache.search.race import race
from sglang_indexcache.search.rules import Constraints

SHORTLIST = 16
"""Exchanges that a round looks at beside the shifts by one layer."""


def refine(
    ledger: Ledger, constraints: Constraints, pattern: Pattern, budget: int
) -> tuple[Pattern, int]:
    """Race promising exchanges against ``pattern``, within the budget ("screened refinement").

    A round measures on a few batches what each F layer is worth and what each S layer would gain
    as F; the exchanges with the best sum, and every shift of an F layer by one, race against the
    pattern as it is. An exchange is made only if the mean over all batches is lower. A round that
    found nothing is repeated on twice as many batches; one that may not fit is not begun.

    Args:
        ledger: measures and remembers.
        constraints: which layers may change.
        pattern: what to improve.
        budget: tokens that may be asked for.

    Returns:
        A pattern with as many F layers and never a higher loss, and the exchanges made.
    """
    ledger.losses(pattern)  # what it starts from is not part of the budget
    exchanges, end = 0, ledger.spent + budget
    first = least_subset(len(ledger.all_batches))
    while winner := _round(ledger, pattern, constraints, first, end):
        if ledger.mean(winner) < ledger.mean(pattern):
            pattern, exchanges = winner, exchanges + 1
        elif first < len(ledger.all_batches):
            first = min(2 * first, len(ledger.all_batches))
        else:
            break
    return pattern, exchanges


def _round(
    ledger: Ledger, pattern: Pattern, constraints: Constraints, first: int, end: int
) -> Pattern | None:
    """The winner of one round that looks at ``first`` batches; None if it may spend too much."""
    subset = ledger.all_batches[:first]
    movable = [*constraints.candidates(pattern), *constraints.restorable(pattern)]
    screening = [constraints.flipped(pattern, layer) for layer in movable]
    needed = ledger.cost(screening, subset)
    if not screening or ledger.spent + needed + ledger.full_evaluation > end:
        return None
    contenders = [pattern, *_promising(ledger, pattern, constraints, subset)]
    needed = ledger.cost(contenders, subset) + ledger.full_evaluation
    if ledger.spent + needed > end:
        return None
    return race(ledger, contenders, first, end - ledger.spent - needed).winner


def _promising(
    ledger: Ledger, pattern: Pattern, constraints: Constraints, subset: Sequence[int]
) -> list[Pattern]:
    """The exchanges with the lowest predicted loss, and every shift by one layer."""
    outs, intos = constraints.candidates(pattern), constraints.restorable(pattern)
    if not outs or not intos:
        return []
    without, restored = (
        ledger.many([constraints.flipped(pattern, layer) for layer in some], subset).mean(axis=1)
        for some in (outs, intos)
    )
    predicted = without[:, None] + restored[None, :]
    best = np.argsort(predicted, axis=None, kind="stable")[:SHORTLIST]
    pairs = [(outs[i // len(intos)], intos[i % len(intos)]) for i in best]
    pairs += [(out, into) for out in outs for into in (out - 1, out + 1) if into in intos]
    return [constraints.exchanged(pattern, out, into) for out, into in dict.fromkeys(pairs)]
