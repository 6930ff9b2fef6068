"""Two searches from opposite ends: each finds what the other cannot see.

Greedy from all F never sees two layers that are free to share together and costly to share alone:
whichever is tried first looks costly. From all S upwards such layers are simply left shared. On the
other hand the way up begins where the loss is highest and measurements say least. So both walk, and
of each retention's two patterns the one with the lower loss on all calibration batches is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.ledger import Ledger, Step
from sglang_indexcache.search.methods.fast import Fast
from sglang_indexcache.search.methods.forward import Forward
from sglang_indexcache.search.rules import Constraints, Targets


@dataclass(frozen=True)
class Both:
    """:class:`Fast`, then :class:`Forward`, with half of the budget each."""

    in_words = "fast greedy and forward selection (lazy re-evaluation, paired racing), the better"
    searches = 2

    def descend(
        self, ledger: Ledger, constraints: Constraints, targets: Targets, budget: int
    ) -> Iterator[Step | Pattern]:
        """See :class:`~sglang_indexcache.search.methods.Method`; the start comes twice."""
        end = ledger.spent + budget
        batches = ledger.tokens_of_batches
        most = budget - Forward().least(constraints, targets, batches)
        least = Fast().least(constraints, targets, batches)
        yield from Fast().descend(ledger, constraints, targets, max(least, min(budget // 2, most)))
        yield from Forward().descend(ledger, constraints, targets, end - ledger.spent)

    def least(self, constraints: Constraints, targets: Targets, batch_tokens: Sequence[int]) -> int:
        """See :class:`~sglang_indexcache.search.methods.Method`.

        Raises:
            SearchError: a loss budget, which forward selection would come to from the wrong side.
        """
        parts = (Fast(), Forward())
        return sum(part.least(constraints, targets, batch_tokens) for part in parts)
