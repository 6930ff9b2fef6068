"""Greedy layer selection at a fraction of the cost: lazy re-evaluation and racing.

Exhaustive greedy measures every candidate on every batch in every step. Almost all of that is
wasted: a flip changes what another flip would do mainly for its two neighbours in the pattern (the
F layer that now serves a longer group, and the next F layer, which would fall back to another
source), and a few batches tell a bad candidate from a good one. So a step here

1. re-measures on a small subset of batches the candidates next to the last flip, and others only
   in the order of what they cost when last measured (lazy greedy), until no candidate left could
   still be the best, with a margin for how much old measurements were found to be off;
2. races the contenders on growing subsets of batches with paired statistics (``race.py``).

What is guaranteed: the same answer when started again; racing never spends beyond the budget (only
the first looks do, where the budget does not even cover those); and with ``exact=True`` the answer
of exhaustive greedy, flip by flip, at its full cost. What is not: that each step commits exhaustive
greedy's flip. The fallback is gradual: where old measurements prove unreliable the margin grows and
more candidates, up to all, are measured again in every step; where the budget ends before the data
has decided, the step says ``decided=False``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.constraints import Constraints, flipped
from sglang_indexcache.search.evaluators import standard_error
from sglang_indexcache.search.ledger import Ledger, Step
from sglang_indexcache.search.race import race
from sglang_indexcache.search.targets import Targets

_MEMORY = 64
"""Re-measurements from which the margin is taken."""
_QUANTILE = 0.9
"""Share of those that the margin covers."""
_LOOKS_PER_STEP = 4
"""Candidates that a step is expected to look at: two neighbours, the oldest, one more."""
_LOOKING_SHARE = 0.5
"""Share of the budget that first looks may take; the rest is for racing."""


@dataclass(frozen=True)
class Fast:
    """:class:`FastGreedy` as a row of :data:`~sglang_indexcache.search.methods.METHODS`."""

    in_words = "fast greedy (lazy re-evaluation, paired racing)"

    def descend(
        self, ledger: Ledger, constraints: Constraints, targets: Targets, budget: int
    ) -> Iterator[Step]:
        """See :class:`~sglang_indexcache.search.methods.Method`."""
        return FastGreedy(ledger, constraints, targets, budget).steps()

    def tokens(
        self, constraints: Constraints, targets: Targets, full_evaluation: int, budget: int
    ) -> int:
        """See :class:`~sglang_indexcache.search.methods.Method`."""
        return budget


def least_subset(batches: int) -> int:
    """The fewest batches of a look: a sixteenth, two at least where there are two."""
    return min(batches, max(2, batches // 16))


def first_subset(batches: int, candidates: int, flips: int, evaluations: float) -> int:
    """Batches of a candidate's first look in a descent.

    Args:
        batches: all there are.
        candidates: that the first step looks at.
        flips: steps.
        evaluations: the descent's budget in full evaluations.
    """
    looks = candidates + _LOOKS_PER_STEP * flips
    affordable = int(_LOOKING_SHARE * evaluations * batches / max(looks, 1))
    return min(batches, max(least_subset(batches), affordable))


class FastGreedy:
    """One descent.

    Args:
        ledger: measures and remembers.
        constraints: which layers may be flipped.
        targets: where to end.
        budget: tokens for the whole descent.
        exact: measure every candidate on every batch in every step, whatever the budget.
    """

    def __init__(
        self,
        ledger: Ledger,
        constraints: Constraints,
        targets: Targets,
        budget: int,
        *,
        exact: bool = False,
    ) -> None:
        self._ledger, self._constraints, self._targets = ledger, constraints, targets
        self._exact = exact
        self._end = ledger.spent + budget
        self._pattern = constraints.start
        count = len(ledger.all_batches)
        self._first = count
        if not exact:
            candidates = len(constraints.candidates(constraints.start))
            flips = len(constraints.start.full_layers) - targets.fewest
            evaluations = budget / ledger.full_evaluation
            self._first = first_subset(count, candidates, flips, evaluations)
        self._subset = ledger.all_batches[: self._first]
        self._cost: dict[int, float] = {}  # nats that flipping a layer adds, when last measured
        self._age: dict[int, int] = {}  # step of that measurement
        self._errors: list[float] = []

    def steps(self) -> Iterator[Step]:
        """Yield the start, then every committed flip."""
        start = self._ledger.losses(self._pattern)
        budget = self._targets.loss_budget
        limit = float(start.mean()) * budget if budget is not None else None
        yield self._ledger.step(self._pattern, self._pattern, None, candidates=1)
        flips = len(self._pattern.full_layers) - self._targets.fewest
        for number in range(flips):
            fresh = self._refresh(number)
            allowance = self._allowance()
            self._look_ahead(fresh)
            contenders = [flipped(self._pattern, layer) for layer in fresh]
            finish = race(self._ledger, contenders, self._first, allowance)
            if limit is not None and self._exceeds(finish.winner, finish.batches, limit):
                return
            [layer] = self._pattern.diff(finish.winner).became_shared
            self._commit(layer)
            yield self._ledger.step(
                self._constraints.start,
                self._pattern,
                layer,
                candidates=len(fresh),
                batches=finish.batches,
                decided=finish.decided,
            )

    def _allowance(self) -> int:
        """Tokens for this step's race: the nearer a mark, the more.

        A layer flipped too early is flipped later anyway; only what a mark leaves out counts.
        """
        full = len(self._pattern.full_layers)
        weights = [
            1 / (count - max(m.full_layers for m in self._targets.marks if m.full_layers < count))
            for count in range(full, self._targets.fewest, -1)
        ]
        return int(max(0, self._end - self._ledger.spent) * weights[0] / sum(weights))

    def _refresh(self, number: int) -> list[int]:
        """Measure on the first subset until no old measurement could be the best."""
        candidates = self._constraints.candidates(self._pattern)
        fresh = [c for c in candidates if c not in self._cost or self._exact]
        stale = [c for c in candidates if c not in fresh]
        if stale:  # one that has waited longest, so that the margin stays honest
            oldest = min(stale, key=lambda c: (self._age[c], c))
            stale.remove(oldest)
            fresh.append(oldest)
        self._look_ahead([*fresh, *stale])
        self._look(fresh, number)
        while stale:
            nearest = min(stale, key=lambda c: (self._cost[c], c))
            if self._cost[nearest] - self._margin() > min(self._cost[c] for c in fresh):
                break
            stale.remove(nearest)
            fresh.append(nearest)
            self._look_ahead([*fresh, *stale])
            self._look([nearest], number)
        return fresh

    def _look_ahead(self, layers: Sequence[int]) -> None:
        """Let idle engines make the next step's first looks, as if the cheapest layer won this one.

        Those are what no measurement holds for any more, what has waited longest, and what else
        could be the best there if nothing is cheaper than last measured.
        """
        known = [layer for layer in layers if layer in self._cost]
        if not known or len(self._pattern.full_layers) - 1 == self._targets.fewest:
            return
        layer = min(known, key=lambda c: (self._cost[c], c))
        pattern, touched = flipped(self._pattern, layer), (layer, *self._neighbours(layer))
        cost = {c: kept for c, kept in self._cost.items() if c not in touched}
        candidates = self._constraints.candidates(pattern)
        looks = [c for c in candidates if c not in cost]
        stale = sorted((c for c in candidates if c in cost), key=lambda c: (cost[c], c))
        if stale:
            looks.append(min(stale, key=lambda c: (self._age[c], c)))
            least = min(cost.values())
            looks += [c for c in stale if cost[c] - self._margin() <= least]
        self._ledger.ahead([flipped(pattern, c) for c in dict.fromkeys(looks)], self._subset)

    def _look(self, layers: list[int], number: int) -> None:
        patterns = [flipped(self._pattern, layer) for layer in layers]
        costs = self._ledger.candidates(self._pattern, patterns, self._subset).mean(axis=1)
        for layer, cost in zip(layers, costs, strict=True):
            if layer in self._cost:
                self._errors.append(self._cost[layer] - float(cost))
            self._cost[layer], self._age[layer] = float(cost), number

    def _margin(self) -> float:
        """How much cheaper than last measured a candidate may have become, in nats."""
        recent = self._errors[-_MEMORY:]
        return max(0.0, float(np.quantile(recent, _QUANTILE))) if recent else 0.0

    def _commit(self, layer: int) -> None:
        touched = (layer, *self._neighbours(layer))
        self._pattern = flipped(self._pattern, layer)
        for neighbour in touched:
            self._cost.pop(neighbour, None)

    def _neighbours(self, layer: int) -> tuple[int, ...]:
        """The F layers before and after ``layer``, whose flips its flip changes."""
        full = self._pattern.full_layers
        place = full.index(layer)
        return (*full[place - 1 : place], *full[place + 1 : place + 2])

    def _exceeds(self, pattern: Pattern, batches: int, limit: float) -> bool:
        """Whether the loss over the start is above ``limit`` nats; all batches where it may be."""
        subset = self._ledger.all_batches[:batches]
        start = self._constraints.start
        added = self._ledger.losses(pattern, subset) - self._ledger.losses(start, subset)
        if added.mean() + 3 * np.nan_to_num(standard_error(added), nan=np.inf) <= limit:
            return False
        return self._ledger.mean(pattern) - self._ledger.mean(start) > limit
