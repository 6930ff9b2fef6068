"""How a search finds its patterns: a method is one file here and one row of :data:`METHODS`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.ledger import Ledger, Step
from sglang_indexcache.search.methods.fast import Fast
from sglang_indexcache.search.methods.forward import Both, Forward
from sglang_indexcache.search.methods.greedy import Greedy
from sglang_indexcache.search.rules import Constraints, Targets


class Method(Protocol):
    """Deterministic: over the same ledger contents it finds the same patterns."""

    @property
    def in_words(self) -> str:
        """For the provenance of what it finds."""

    @property
    def searches(self) -> int:
        """How many searches it makes; the default budget is for so many."""

    def descend(
        self, ledger: Ledger, constraints: Constraints, targets: Targets, budget: int
    ) -> Iterator[Step | Pattern]:
        """Yield the start as a step, then what it finds on its way.

        A step that arrives at a mark, and a pattern with as many F layers as a mark, is an answer
        for that mark; whoever takes it measures it on all batches, and keeps the best of several.
        ``budget`` is in tokens, is :meth:`least` or more, and pays for everything that is asked
        for until the last mark's answer is measured.
        """

    def least(self, constraints: Constraints, targets: Targets, batch_tokens: Sequence[int]) -> int:
        """Tokens that :meth:`descend` cannot do without.

        A method without a choice, such as exhaustive greedy, takes exactly this.

        Args:
            batch_tokens: tokens of each batch that is searched on.
        """


METHODS: Mapping[str, type[Method]] = {
    "both": Both,
    "fast": Fast,
    "forward": Forward,
    "greedy": Greedy,
}
