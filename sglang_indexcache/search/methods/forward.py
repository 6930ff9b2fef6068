"""Forward selection: from all S upwards, each time the F layer that lowers the loss most.

It reaches a low retention in few steps. What an added layer gains shrinks as others are added, so
the old measurement of a candidate is mostly too good, and measuring again in the order of the old
measurements until none could be better (lazy greedy) is all that a step needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.ledger import Ledger, Step
from sglang_indexcache.search.methods.fast import Descent, Fast, FastGreedy, least_subset
from sglang_indexcache.search.rules import Constraints, Targets


@dataclass(frozen=True)
class Ascent(Descent):
    """The way from all S upwards, to the mark with the most F layers."""

    looks_per_step = 6
    """The best of old measurements, and those behind it that turn out to be too good."""

    @property
    def begin(self) -> Pattern:
        """Only layers that may not be S are F."""
        return self.constraints.keeping(self.constraints.fixed)

    @property
    def counts(self) -> range:
        """See :class:`Descent`."""
        return range(self.constraints.fewest, self.targets.marks[0].full_layers)

    def candidates(self, pattern: Pattern) -> list[int]:
        """See :class:`Descent`."""
        return self.constraints.restorable(pattern)

    def outdated(self, pattern: Pattern, layer: int) -> Sequence[int]:
        """None: see the module."""
        return ()

    def least(self, batch_tokens: Sequence[int]) -> int:
        """See :class:`Descent`; the first pattern is looked at, or a mark's."""
        is_mark = self.targets.mark_at(self.constraints.fewest) is not None
        batches = len(batch_tokens) if is_mark else least_subset(len(batch_tokens))
        return super().least(batch_tokens) + sum(batch_tokens[:batches])


@dataclass(frozen=True)
class Forward:
    """:class:`~sglang_indexcache.search.methods.fast.FastGreedy` upwards."""

    in_words = "forward selection (lazy re-evaluation, paired racing)"
    searches = 1

    def descend(
        self, ledger: Ledger, constraints: Constraints, targets: Targets, budget: int
    ) -> Iterator[Step | Pattern]:
        """See :class:`~sglang_indexcache.search.methods.Method`; the fewest F layers first."""
        way, end = Ascent(constraints, targets), ledger.spent + budget
        yield ledger.step(constraints.start, constraints.start, None, candidates=1)
        if targets.mark_at(constraints.fewest):
            yield way.begin
        steps = FastGreedy(ledger, way, end - ledger.spent).steps()
        next(steps)  # the start again
        yield from steps

    def least(self, constraints: Constraints, targets: Targets, batch_tokens: Sequence[int]) -> int:
        """See :class:`~sglang_indexcache.search.methods.Method`."""
        return Ascent(constraints, targets).least(batch_tokens)


@dataclass(frozen=True)
class Both:
    """:class:`Fast`, then :class:`Forward`, with half of the budget each.

    Greedy from all F never sees two layers that are free to share together and costly to share
    alone: whichever is tried first looks costly. From all S upwards such layers are simply left
    shared. On the other hand the way up begins where the loss is highest and measurements say
    least. So both walk, and of each retention's two patterns the one with the lower loss on all
    calibration batches is kept.
    """

    in_words = "the better of fast greedy and forward selection (lazy re-evaluation, paired racing)"
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
        """See :class:`~sglang_indexcache.search.methods.Method`."""
        parts = (Fast(), Forward())
        return sum(part.least(constraints, targets, batch_tokens) for part in parts)
