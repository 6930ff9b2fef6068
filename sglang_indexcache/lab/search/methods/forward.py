"""Forward selection: from all S upwards, each time the F layer that lowers the loss most.

It reaches a low retention in few steps. What an added layer gains shrinks as others are added, so
the old measurement of a candidate is mostly too good, and measuring again in the order of the old
measurements until none could be better (lazy greedy) is all that a step needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sglang_indexcache.lab.search.ledger import Ledger, Step
from sglang_indexcache.lab.search.methods.fast import Descent, FastGreedy, least_subset
from sglang_indexcache.lab.search.rules import Proposal
from sglang_indexcache.pattern import Pattern


@dataclass(frozen=True)
class Ascent(Descent):
    """The way from all S upwards, to the mark with the most F layers."""

    looks_per_step = 6
    """The best of old measurements, and those behind it that turn out to be too good."""

    def walk(self, ledger: Ledger, budget: int) -> Iterator[Step | Proposal]:
        """See :class:`Descent`; the fewest F layers come first."""
        start, end = self.constraints.start, ledger.spent + budget
        yield ledger.step(start, start, None, candidates=1)
        if mark := self.targets.mark_at(self.constraints.fewest):
            yield Proposal(mark, self.begin)
        steps = FastGreedy(ledger, self, end - ledger.spent).steps()
        next(steps)  # the start again
        yield from steps

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
        """Return none: see the module."""
        return ()

    def least(self, batch_tokens: Sequence[int]) -> int:
        """See :class:`Descent`; the first pattern is looked at, or a mark's."""
        is_mark = self.targets.mark_at(self.constraints.fewest) is not None
        batches = len(batch_tokens) if is_mark else least_subset(len(batch_tokens))
        return super().least(batch_tokens) + sum(batch_tokens[:batches])
