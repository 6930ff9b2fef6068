"""How to search: a method, a refinement and a budget, and what they cost before they run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from sglang_indexcache.errors import SearchError
from sglang_indexcache.search.constraints import Constraints
from sglang_indexcache.search.methods import METHODS, Method
from sglang_indexcache.search.methods.fast import Fast
from sglang_indexcache.search.methods.greedy import Greedy, evaluations
from sglang_indexcache.search.refinements import REFINEMENTS, Refinement
from sglang_indexcache.search.refinements.exchange import Screened
from sglang_indexcache.search.targets import Targets

DEFAULT_SHARE = 0.1
"""The budget that nobody gave, in shares of what exhaustive greedy forwards ..."""
DEFAULT_EVALUATIONS_PER_LAYER = 2
"""... or this, where it is more: with few layers, a tenth is too little to tell patterns apart."""
REFINEMENT_SHARE = 0.35
"""Share of the budget that is set aside for refinement."""

_Row = TypeVar("_Row")


@dataclass(frozen=True)
class Budget:
    """Tokens that a search may ask for.

    Baselines and held-out batches are measured afterwards and are not part of it.

    Attributes:
        method: for the method, until its last pattern is measured on all batches.
        refinement: set aside for the refinement, which also gets what the method leaves.
        exhaustive: what exhaustive greedy would ask for.
        is_kept: nothing that is to run spends beyond. False: nobody can say what it will spend.
    """

    method: int
    refinement: int
    exhaustive: int
    is_kept: bool

    @property
    def total(self) -> int:
        """Of the whole search."""
        return self.method + self.refinement

    @property
    def share(self) -> float:
        """Of exhaustive greedy's tokens."""
        return self.total / self.exhaustive


@dataclass(frozen=True)
class Options:
    """How to search.

    Attributes:
        method: finds a pattern for every mark.
        refinement: improves each of them.
        share: the budget in shares of what exhaustive greedy would forward. None is
            :data:`DEFAULT_SHARE`, or more where the search needs more.

    Raises:
        SearchError: a share that is not above 0 and at most 1.
    """

    method: Method = field(default_factory=Fast)
    refinement: Refinement = field(default_factory=Screened)
    share: float | None = None

    def __post_init__(self) -> None:
        if self.share is not None and not 0 < self.share <= 1:
            raise SearchError(f"the budget's share must be above 0 and at most 1, got {self.share}")

    @classmethod
    def parse(cls, method: str, refinement: str = "none", share: float | None = None) -> Options:
        """From names such as ``fast``, ``greedy:4`` (four blocks) and ``beam:8`` (eight wide).

        Raises:
            SearchError: an unknown name, or a number that does not belong to it.
        """
        return cls(
            _chosen("method", METHODS, method),
            _chosen("refinement", REFINEMENTS, refinement),
            share,
        )

    def in_words(self, *, is_refined: bool = True) -> str:
        """For provenance, which names the refinement only where it ran."""
        refinement = self.refinement.in_words if is_refined else ""
        return ", ".join(filter(None, (self.method.in_words, refinement)))

    def budget(
        self, constraints: Constraints, targets: Targets, batch_tokens: Sequence[int]
    ) -> Budget:
        """What the search may ask for: never less than it needs, nor more than was said.

        Args:
            constraints: of the search.
            targets: of the search.
            batch_tokens: tokens of each batch that is searched on.

        Raises:
            SearchError: a share below what the method needs or of what keeps to none, a method
                that needs more than exhaustive greedy here, or targets that it cannot aim at.
        """
        full = sum(batch_tokens)
        exhaustive = evaluations(constraints, targets) * full
        needed = self.method.least(constraints, targets, batch_tokens)
        least = needed or 0
        is_kept = needed is not None and self.refinement.tokens(0) is not None
        self._check(least, exhaustive, is_kept=is_kept)
        total = round((self.share or DEFAULT_SHARE) * exhaustive)
        if self.share is None:
            several = DEFAULT_EVALUATIONS_PER_LAYER * len(constraints.start) * full
            total = min(exhaustive, max(total, several))
        set_aside = self.refinement.tokens(int(REFINEMENT_SHARE * total)) or 0
        if self.share is None:
            total = max(total, least + set_aside)
            if not isinstance(self.method, Greedy):  # which is refined on top of its own cost
                total = min(total, exhaustive)
        method = max(total - set_aside, least)
        return Budget(method, total - method, exhaustive, is_kept)

    def _check(self, least: int, exhaustive: int, *, is_kept: bool) -> None:
        """Refuse what cannot be kept."""
        if self.share is not None and not is_kept:
            raise SearchError(
                f"--budget does not bound this: {self.in_words()}. Leave --budget away."
            )
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


@dataclass(frozen=True)
class Cost:
    """The bill of one search.

    Attributes:
        evaluations: patterns times the whole calibration set.
        sequences: forward passes of one sequence.
        tokens: tokens forwarded.
        hours: wall-clock, or None without a prefill rate.
        gpu_hours: ``hours`` times the GPUs of all servers, or None.
    """

    evaluations: float
    sequences: float
    tokens: float
    hours: float | None
    gpu_hours: float | None


def cost(
    constraints: Constraints,
    targets: Targets,
    options: Options,
    sequences: int,
    context: int,
    tokens_per_second: float | None = None,
    gpus: int = 1,
    servers: int = 1,
) -> Cost:
    """Predict a search.

    The bill is the whole budget. A pattern with S layers prefills faster than the all-F rate that
    is usually at hand, so hours are an upper bound too.

    The rate is that of one server as it will be used: see :func:`busy_share`.

    Args:
        constraints: of the search.
        targets: of the search.
        options: of the search.
        sequences: in the whole calibration set.
        context: tokens of each.
        tokens_per_second: prefill rate of one server at this context, as far as its ranks work.
        gpus: of one server.
        servers: how many of them share the work; taken to be always busy.

    Raises:
        SearchError: numbers below one, or options whose cost nobody can predict.
    """
    if min(sequences, context, gpus, servers) < 1 or (tokens_per_second or 1) <= 0:
        raise SearchError("sequences, context, GPUs, servers and the rate must be above zero")
    budget = options.budget(constraints, targets, [context] * sequences)
    if not budget.is_kept:
        raise SearchError(f"there is no cost model for: {options.in_words()}")
    tokens = budget.total
    hours = tokens / tokens_per_second / servers / 3600 if tokens_per_second else None
    return Cost(
        evaluations=tokens / (sequences * context),
        sequences=tokens / context,
        tokens=tokens,
        hours=hours,
        gpu_hours=hours * gpus * servers if hours is not None else None,
    )


def busy_share(per_batch: int, ranks: int) -> float:
    """The share of a server's data-parallel ranks that work, on average over a batch.

    A rank takes whole sequences, so the last round of a batch may leave ranks idle. A call may
    hold several batches where they are short; this is for calls of one, the worst case.

    Args:
        per_batch: sequences in a batch.
        ranks: data-parallel ranks of the server.

    Raises:
        SearchError: numbers below one.
    """
    if min(per_batch, ranks) < 1:
        raise SearchError("sequences in a batch and data-parallel ranks must be above zero")
    rounds = -(-per_batch // ranks)
    return per_batch / (rounds * ranks)


def _chosen(kind: str, table: Mapping[str, type[_Row]], text: str) -> _Row:
    """The row that ``text`` names, with its number where one is given."""
    name, colon, number = text.partition(":")
    if name not in table:
        raise SearchError(f"{kind} {name!r} is unknown; there are {', '.join(table)}")
    row: Any = table[name]
    if not colon:
        return row()  # type: ignore[no-any-return]
    if not fields(row):
        raise SearchError(f"{kind} {name} takes no number, got {text!r}")
    if not number.isdigit():
        raise SearchError(f"{kind} {name} takes a number, such as {name}:4, got {text!r}")
    return row(int(number))  # type: ignore[no-any-return]
