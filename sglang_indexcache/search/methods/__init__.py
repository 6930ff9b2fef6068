"""How a search finds its patterns: a method is one file here and one row of :data:`METHODS`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.constraints import Constraints
from sglang_indexcache.search.ledger import Ledger, Step
from sglang_indexcache.search.methods.fast import Fast
from sglang_indexcache.search.methods.greedy import Greedy
from sglang_indexcache.search.methods.similarity import Similarity
from sglang_indexcache.search.targets import Targets


class Method(Protocol):
    """A dataclass without fields, or with one: the number in ``--method greedy:4``.

    Deterministic: over the same ledger contents it finds the same patterns.
    """

    @property
    def in_words(self) -> str:
        """For the provenance of what it finds."""

    def descend(
        self, ledger: Ledger, constraints: Constraints, targets: Targets, budget: int
    ) -> Iterator[Step | Pattern]:
        """Yield the start as a step, then what it finds on its way to the fewest F layers.

        A step that arrives at a mark, and a pattern with as many F layers as a mark, is that
        mark's answer. ``budget`` is in tokens, for a method that keeps to one.
        """

    def tokens(
        self, constraints: Constraints, targets: Targets, full_evaluation: int, budget: int
    ) -> int | None:
        """Tokens that :meth:`descend` asks for at most; None where nobody can say.

        Where the method spends the budget, this is the budget. ``full_evaluation`` is the tokens
        of one pattern on all the data.
        """


METHODS: Mapping[str, type[Method]] = {
    "fast": Fast,
    "greedy": Greedy,
    "similarity": Similarity,
}
