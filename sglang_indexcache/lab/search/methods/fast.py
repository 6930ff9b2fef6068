"""Greedy layer selection at a fraction of the cost: lazy re-evaluation and racing.

Exhaustive greedy measures every candidate on every batch in every step. Almost all of that is
wasted: a flip changes what another flip would do mainly for its two neighbours in the pattern (the
F layer that now serves a longer group, and the next F layer, which would fall back to another
source), and a few batches tell a bad candidate from a good one. So a step here

1. re-measures on a small subset of batches the candidates next to the last flip, and others only
   in the order of what they cost when last measured (lazy greedy), until no candidate left could
   still be the best, with a margin for how much old measurements were found to be off;
2. races the contenders on growing subsets of batches with paired statistics (``race.py``).

What is guaranteed: the same answer when started again; never more tokens than the budget, because
what the rest of the way needs at least is set aside before a step spends on anything else; and with
``exact=True`` the answer of exhaustive greedy, flip by flip, at its full cost. What is not: that
each step commits exhaustive greedy's flip. The fallback is gradual: where old measurements prove
unreliable the margin grows and more candidates, up to all, are measured again in every step; where
the budget ends before the data has decided, the step says ``decided=False``.

The same search can walk from all S upwards: see ``forward.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from sglang_indexcache.lab.search.ledger import Ledger, Step
from sglang_indexcache.lab.search.methods.greedy import evaluations
from sglang_indexcache.lab.search.race import race
from sglang_indexcache.lab.search.rules import Constraints, Proposal, Targets
from sglang_indexcache.pattern import Pattern

_MEMORY = 64
"""Re-measurements from which the margin is taken."""
_QUANTILE = 0.9
"""Share of those that the margin covers."""
_LOOKING_SHARE = 0.5
"""Share of the budget that first looks may take; the rest is for racing."""
_LEAST_LOOKS = 2
"""Candidates that a step has to look at, after the first: what the last flip changed."""


@dataclass(frozen=True)
class Descent:
    """The way from all F downwards: its steps, and what they need at least."""

    targets: Targets
    looks_per_step = 4
    """Candidates that a step is expected to look at: two neighbours, the oldest, one more."""

    def walk(self, ledger: Ledger, budget: int) -> Iterator[Step | Proposal]:
        """Search along it, as :class:`~sglang_indexcache.lab.search.methods.Method` says.

        A budget that pays for exhaustive greedy is spent on exactly that.
        """
        exact = budget >= evaluations(self.targets) * ledger.full_evaluation
        return FastGreedy(ledger, self, budget, exact=exact).steps()

    @property
    def constraints(self) -> Constraints:
        """Constraints of the targets."""
        return self.targets.constraints

    @property
    def begin(self) -> Pattern:
        """The pattern before the first step."""
        return self.constraints.start

    @property
    def counts(self) -> range:
        """F layers before each step."""
        return range(len(self.begin.full_layers), self.targets.fewest, -1)

    def candidates(self, pattern: Pattern) -> list[int]:
        """Return the layers that the next step may flip, ascending."""
        return self.constraints.candidates(pattern)

    def outdated(self, pattern: Pattern, layer: int) -> Sequence[int]:
        """Return the layers whose measurements are void once ``layer`` of ``pattern`` flips."""
        before = pattern.full_layers
        place = before.index(layer)
        return (*before[place - 1 : place], *before[place + 1 : place + 2])

    def ahead(self, count: int) -> list[int]:
        """Return the F layers of the marks that steps from ``count`` F layers on arrive at."""
        direction = self.counts.step
        marks = (mark.full_layers for mark in self.targets.marks)
        return [mark for mark in marks if (mark - count) * direction > 0]

    def looks(self, count: int) -> int:
        """Count the candidates that the step from ``count`` F layers on has to look at."""
        begin = len(self.begin.full_layers)
        remaining = len(self.candidates(self.begin)) - abs(count - begin)
        return remaining if count == begin else min(_LEAST_LOOKS, remaining)

    def fixed(self, count: int, subset: int, full: int) -> int:
        """Count the tokens that the marks take on all batches, from ``count`` F layers on.

        Each has had a look already: ``subset`` of the ``full`` tokens of all batches.
        """
        return len(self.ahead(count)) * (full - subset)

    def needs(self, count: int, subset: int, full: int) -> int:
        """Count the least tokens of all steps from ``count`` F layers on; see :meth:`fixed`."""
        steps = self.counts[self.counts.index(count) :] if count in self.counts else ()
        looks = sum(self.looks(before) for before in steps)
        return looks * subset + self.fixed(count, subset, full)

    def least(self, batch_tokens: Sequence[int]) -> int:
        """Count the least tokens of the whole way, the start on all batches included."""
        subset = sum(batch_tokens[: least_subset(len(batch_tokens))])
        full = sum(batch_tokens)
        return full + self.needs(len(self.begin.full_layers), subset, full)


def least_subset(batches: int) -> int:
    """Return the fewest batches of a look: a sixteenth, two at least where there are two."""
    return min(batches, max(2, batches // 16))


def first_subset(batch_tokens: Sequence[int], looks: int, tokens: int) -> int:
    """Return the batches of a first look, of which ``looks`` may take ``tokens`` together."""
    count = least_subset(len(batch_tokens))
    while count < len(batch_tokens) and looks * sum(batch_tokens[: count + 1]) <= tokens:
        count += 1
    return count


class FastGreedy:
    """One search along a way.

    Args:
        budget: in tokens; :meth:`Descent.least` at least.
        exact: measure every candidate on every batch in every step, whatever the budget.
    """

    def __init__(
        self, ledger: Ledger, descent: Descent, budget: int, *, exact: bool = False
    ) -> None:
        self._ledger, self._descent, self._exact = ledger, descent, exact
        self._end = ledger.spent + budget
        self._pattern = descent.begin
        self._first = len(ledger.all_batches)
        if not exact:
            self._first = self._affordable_subset(budget)
        self._subset = ledger.all_batches[: self._first]
        self._subset_tokens = sum(ledger.tokens_of_batches[: self._first])
        self._cost: dict[int, float] = {}  # nats that flipping a layer adds, when last measured
        self._age: dict[int, int] = {}  # step of that measurement
        self._errors: list[float] = []

    def steps(self) -> Iterator[Step]:
        """Yield the start, then every committed flip."""
        origin = self._descent.constraints.start
        yield self._ledger.step(origin, origin, None, candidates=1)
        for number in range(len(self._descent.counts)):
            fresh = self._refresh(number)
            allowance = self._allowance()
            contenders = [self._flipped(self._pattern, layer) for layer in fresh]
            finish = race(self._ledger, contenders, self._first, allowance)
            [layer] = set(self._pattern.full_layers) ^ set(finish.winner.full_layers)
            self._commit(layer)
            yield self._ledger.step(
                origin,
                self._pattern,
                layer,
                candidates=len(fresh),
                batches=finish.batches,
                decided=finish.decided,
            )

    def _affordable_subset(self, budget: int) -> int:
        """Return the batches of a first look."""
        ledger, descent = self._ledger, self._descent
        set_aside = ledger.cost([descent.constraints.start], ledger.all_batches)
        set_aside += descent.fixed(len(descent.begin.full_layers), 0, ledger.full_evaluation)
        looks = len(descent.candidates(descent.begin))
        looks += descent.looks_per_step * len(descent.counts)
        tokens = int(_LOOKING_SHARE * (budget - set_aside))
        return first_subset(ledger.tokens_of_batches, looks, tokens)

    def _spare_tokens(self) -> int:
        """Count the tokens that are left once marks, later steps and least looks have theirs."""
        count, full = len(self._pattern.full_layers), self._ledger.full_evaluation
        needs = self._descent.needs(count, self._subset_tokens, full)
        this_step = self._descent.looks(count) * self._subset_tokens
        return self._end - self._ledger.spent - needs + this_step

    def _affords(self, layers: Sequence[int]) -> bool:
        """Return whether first looks at these would leave enough for what later steps need."""
        patterns = [self._flipped(self._pattern, layer) for layer in layers]
        return self._exact or self._ledger.cost(patterns, self._subset) <= self._spare_tokens()

    def _allowance(self) -> int:
        """Return the tokens for this step's race: the nearer a mark, the more.

        A layer flipped too early is flipped later anyway; only what a mark leaves out counts.
        """
        counts = self._descent.counts
        place = counts.index(len(self._pattern.full_layers))
        weights = [
            1 / min(abs(count - mark) for mark in self._descent.ahead(count))
            for count in counts[place:]
        ]
        return int(max(0, self._spare_tokens()) * weights[0] / sum(weights))

    def _refresh(self, number: int) -> list[int]:
        """Measure on the first subset until no old measurement could be the best."""
        candidates = self._descent.candidates(self._pattern)
        fresh = [c for c in candidates if c not in self._cost or self._exact]
        stale = [c for c in candidates if c not in fresh]
        if stale:  # one that has waited longest, so that the margin stays honest
            oldest = min(stale, key=lambda c: (self._age[c], c))
            if self._affords([*fresh, oldest]):
                stale.remove(oldest)
                fresh.append(oldest)
        if fresh:
            self._look(fresh, number)
        while stale:
            nearest = min(stale, key=lambda c: (self._cost[c], c))
            if fresh and (self._is_behind(nearest, fresh) or not self._affords([nearest])):
                break
            stale.remove(nearest)
            fresh.append(nearest)
            self._look([nearest], number)
        return fresh

    def _is_behind(self, stale: int, fresh: list[int]) -> bool:
        """Return whether old measurements say that a candidate cannot be the best any more."""
        return self._cost[stale] - self._margin() > min(self._cost[c] for c in fresh)

    def _look(self, layers: list[int], number: int) -> None:
        patterns = [self._flipped(self._pattern, layer) for layer in layers]
        costs = self._ledger.candidates(self._pattern, patterns, self._subset).mean(axis=1)
        for layer, cost in zip(layers, costs, strict=True):
            if layer in self._cost:
                self._errors.append(self._cost[layer] - float(cost))
            self._cost[layer], self._age[layer] = float(cost), number

    def _margin(self) -> float:
        """Return how many nats cheaper than last measured a candidate may have become."""
        recent = self._errors[-_MEMORY:]
        return max(0.0, float(np.quantile(recent, _QUANTILE))) if recent else 0.0

    def _flipped(self, pattern: Pattern, layer: int) -> Pattern:
        return self._descent.constraints.flipped(pattern, layer)

    def _commit(self, layer: int) -> None:
        for outdated in (layer, *self._descent.outdated(self._pattern, layer)):
            self._cost.pop(outdated, None)
        self._pattern = self._flipped(self._pattern, layer)
