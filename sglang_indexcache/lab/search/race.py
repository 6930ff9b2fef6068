"""Compare patterns on growing subsets of the batches and drop the losers early.

All contenders see the same batches, so what is compared is the paired difference to the leader:
the large differences between batches cancel, and a few batches often decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sglang_indexcache.lab.search.evaluators import Floats
from sglang_indexcache.lab.search.ledger import Ledger
from sglang_indexcache.lab.stats.bounds import student_quantile
from sglang_indexcache.pattern import Pattern

CONFIDENCE = 0.95
"""One-sided confidence with which a contender must be worse than the leader to be dropped.

Of one comparison, at one look, with a leader that was picked for being lowest there: not of a race,
in which many are made, and not of a search. ``docs/search.md`` has how often races miss the best.
"""

_PRIOR_FREEDOM = 4
"""Weight of the spread pooled over all contenders, in degrees of freedom: two batches of one
contender say little about its spread, those of all contenders together say enough."""


@dataclass(frozen=True)
class Finish:
    """End of a race.

    Attributes:
        winner: the pattern with the lowest mean on the ``batches`` that it was measured on.
        decided: every other contender was dropped for being worse with confidence, or all
            batches were measured. False: the allowance ended first. A race that dropped the best
            contender early is decided, too.
    """

    winner: Pattern
    batches: int
    decided: bool


def race(ledger: Ledger, contenders: Sequence[Pattern], first: int, allowance: int) -> Finish:
    """Find the contender with the lowest loss.

    The subset of batches doubles from ``first``. After each doubling, contenders that are worse
    than the leader with confidence :data:`CONFIDENCE` leave. Where the allowance cannot take all
    of the others further, the best ones that it can take go on.

    Args:
        first: batches of the first subset. It is measured whatever the allowance says.
        allowance: tokens that may be asked for beyond the first subset.
    """
    alive = list(dict.fromkeys(contenders))
    count, decided = min(first, len(ledger.all_batches)), True
    losses = ledger.many(alive, ledger.all_batches[:count])
    while True:
        alive = [alive[i] for i in _not_worse(losses)]
        if len(alive) == 1 or count == len(ledger.all_batches):
            return Finish(alive[0], count, decided)
        measured, count = count, min(2 * count, len(ledger.all_batches))
        affordable = _affordable(ledger, alive, count, allowance)
        if len(affordable) < 2:
            return Finish(alive[0], measured, decided=False)
        decided = decided and len(affordable) == len(alive)
        alive = affordable
        allowance -= ledger.cost(alive, ledger.all_batches[:count])
        losses = ledger.many(alive, ledger.all_batches[:count])


def _affordable(
    ledger: Ledger, alive: Sequence[Pattern], count: int, allowance: int
) -> list[Pattern]:
    """Return the longest head of ``alive`` that the allowance takes to ``count`` batches."""
    batches = ledger.all_batches[:count]
    contenders = list(alive)
    while contenders and ledger.cost(contenders, batches) > allowance:
        contenders.pop()
    return contenders


def _not_worse(losses: Floats) -> list[int]:
    """Return rows of ``[contenders, batches]`` not surely worse than the best, best first."""
    order = np.argsort(losses.mean(axis=1), kind="stable")
    count = losses.shape[1]
    difference = losses[order] - losses[order[0]]
    if count < 2:
        return [int(i) for i in order]
    variances = difference.var(axis=1, ddof=1)
    pooled = variances[1:].mean() if len(order) > 1 else 0.0
    freedom = count - 1 + _PRIOR_FREEDOM
    variance = ((count - 1) * variances + _PRIOR_FREEDOM * pooled) / freedom
    bound = student_quantile(CONFIDENCE, freedom) * np.sqrt(variance / count)
    keep = difference.mean(axis=1) <= bound
    keep[0] = True
    return [int(i) for i in order[keep]]
