"""Options of a search, and the tokens that it may take."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sglang_indexcache.errors import SearchError
from sglang_indexcache.lab.search.methods import METHODS, Method
from sglang_indexcache.lab.search.methods.greedy import Greedy, evaluations
from sglang_indexcache.lab.search.rules import Targets

DEFAULT_SHARE = 0.1
"""The budget that nobody gave, of each search, in shares of what exhaustive greedy forwards ..."""
DEFAULT_EVALUATIONS_PER_LAYER = 2
"""... or this, where it is more: with few layers, a tenth is too little to tell patterns apart."""
REFINEMENT_SHARE = 0.35
"""Share of the budget that is set aside for refinement."""


@dataclass(frozen=True)
class Budget:
    """Tokens that a search may ask for.

    Baselines and held-out batches are measured afterwards and are not part of it.

    Attributes:
        method: for the method, until its last pattern is measured on all batches.
        refinement: set aside for the refinement, which also gets what the method leaves.
        exhaustive: what exhaustive greedy would ask for.
    """

    method: int
    refinement: int
    exhaustive: int

    @property
    def total(self) -> int:
        """Tokens of the whole search."""
        return self.method + self.refinement

    @property
    def share(self) -> float:
        """Share of exhaustive greedy's tokens."""
        return self.total / self.exhaustive


@dataclass(frozen=True)
class Options:
    """Options of a search.

    Attributes:
        share: the budget in shares of what exhaustive greedy would forward. None is
            :data:`DEFAULT_SHARE`, or more where the search needs more.
        refine: improve each found pattern by exchanges.

    Raises:
        SearchError: a share that is not above 0 and at most 1.
    """

    method: Method = METHODS["fast"]
    share: float | None = None
    refine: bool = True

    def __post_init__(self) -> None:
        if self.share is not None and not 0 < self.share <= 1:
            raise SearchError(f"the budget's share must be above 0 and at most 1, got {self.share}")

    @classmethod
    def parse(
        cls,
        method: str,
        share: float | None = None,
        *,
        refine: bool = True,
        methods: Mapping[str, Method] = METHODS,
    ) -> Options:
        """Parse a method's name.

        Raises:
            SearchError: there is none of that name.
        """
        if method not in methods:
            raise SearchError(f"method {method!r} is unknown; there are {', '.join(methods)}")
        return cls(methods[method], share, refine and methods[method].by_loss)

    @classmethod
    def best(
        cls,
        targets: Targets,
        batch_tokens: Sequence[int],
        share: float | None = None,
        methods: Mapping[str, Method] = METHODS,
    ) -> tuple[Options, str]:
        """Choose where nobody did: both searches; else one, and say why two do not fit."""
        single, double = cls(methods["fast"], share), cls(methods["both"], share)
        try:
            budget = double.budget(targets, batch_tokens)
        except SearchError:
            return single, "method: fast alone, because the budget is too little for both searches"
        if share is None or budget.total >= double.usual(targets, batch_tokens):
            return double, ""
        return single, (
            f"method: fast alone, because --budget {share:g} leaves each of two searches less than "
            "it usually has; --method both makes them all the same"
        )

    def in_words(self, *, is_refined: bool = True) -> str:
        """Say it for provenance, which names the refinement only where it ran."""
        refinement = "screened refinement" if is_refined and self.refine else ""
        return ", then ".join(filter(None, (self.method.in_words, refinement)))

    def usual(self, targets: Targets, batch_tokens: Sequence[int]) -> int:
        """Return the search's tokens where nobody gives a budget, and it needs no more."""
        if not self.method.by_loss:
            return self.method.least(targets, batch_tokens)
        full = sum(batch_tokens)
        exhaustive = evaluations(targets) * full
        several = DEFAULT_EVALUATIONS_PER_LAYER * len(targets.constraints.start) * full
        per_search = max(round(DEFAULT_SHARE * exhaustive), several)
        return min(exhaustive, self.method.searches * per_search)

    def budget(self, targets: Targets, batch_tokens: Sequence[int]) -> Budget:
        """Return the tokens to ask for: never less than needed, nor more than was allowed.

        Raises:
            SearchError: a share below what the method needs, or a method that needs more than
                exhaustive greedy here.
        """
        exhaustive = evaluations(targets) * sum(batch_tokens)
        least = self.method.least(targets, batch_tokens)
        self._check(least, exhaustive)
        if self.share is not None:
            total = round(self.share * exhaustive)
        else:
            total = self.usual(targets, batch_tokens)
        set_aside = int(REFINEMENT_SHARE * total) if self.refine else 0
        if self.share is None:
            total = max(total, least + set_aside)
            if not isinstance(self.method, Greedy):  # which is refined on top of its own cost
                total = min(total, exhaustive)
        method = max(total - set_aside, least)
        return Budget(method, total - method, exhaustive)

    def _check(self, least: int, exhaustive: int) -> None:
        """Refuse what cannot be kept."""
        if least > exhaustive:
            raise SearchError(
                f"{self.method.in_words} needs {least:,} tokens here, and exhaustive greedy only "
                f"{exhaustive:,}. Search with --method greedy, or give more and smaller batches."
            )
        if self.share is not None and round(self.share * exhaustive) < least:
            enough = math.ceil(1000 * least / exhaustive) / 1000
            raise SearchError(
                f"--budget {self.share:g} is too little: {self.method.in_words} needs at least "
                f"{enough:g} of exhaustive greedy's tokens here. Give that, or leave --budget away."
            )
