"""What improves a pattern that a method found: a refinement is one row of :data:`REFINEMENTS`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.constraints import Constraints
from sglang_indexcache.search.ledger import Known, Ledger
from sglang_indexcache.search.refinements.beam import Beam
from sglang_indexcache.search.refinements.exchange import Screened, Swap


class Refinement(Protocol):
    """A dataclass without fields, or with one: the number in ``--refine beam:8``."""

    @property
    def in_words(self) -> str:
        """For the provenance of what it improves; empty for none."""

    def refine(
        self, ledger: Ledger, constraints: Constraints, pattern: Pattern, known: Known, budget: int
    ) -> tuple[Pattern, int]:
        """Return a pattern with as many F layers and never a higher loss, and its exchanges.

        Args:
            ledger: measures and remembers.
            constraints: which layers may change.
            pattern: what to improve.
            known: what the search has found, down to the last mark.
            budget: tokens that may be asked for, by a refinement that keeps to it.
        """

    def tokens(self, budget: int) -> int | None:
        """Tokens that it asks for at most; None where nobody can say."""


@dataclass(frozen=True)
class Unrefined:
    """Leaves every pattern as it was found."""

    in_words = ""

    def refine(
        self, ledger: Ledger, constraints: Constraints, pattern: Pattern, known: Known, budget: int
    ) -> tuple[Pattern, int]:
        """See :class:`Refinement`."""
        return pattern, 0

    def tokens(self, budget: int) -> int | None:
        """See :class:`Refinement`."""
        return 0


REFINEMENTS: Mapping[str, type[Refinement]] = {
    "none": Unrefined,
    "screened": Screened,
    "swap": Swap,
    "beam": Beam,
}
