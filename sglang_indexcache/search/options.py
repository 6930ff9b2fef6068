"""How to search: a method, a refinement and a budget, and what they cost before they run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from sglang_indexcache.errors import SearchError
from sglang_indexcache.search.constraints import Constraints
from sglang_indexcache.search.methods import METHODS, Method
from sglang_indexcache.search.methods.fast import Fast
from sglang_indexcache.search.methods.greedy import evaluations
from sglang_indexcache.search.refinements import REFINEMENTS, Refinement
from sglang_indexcache.search.refinements.exchange import Screened
from sglang_indexcache.search.targets import Targets

REFINEMENT_SHARE = 0.35
"""Share of the budget that is kept for refinement, also after a method that keeps to none."""
LEAST_EVALUATIONS_PER_LAYER = 2
"""The budget is never below this: a first look at every layer costs that much where there are few
layers or batches."""

_Row = TypeVar("_Row")


@dataclass(frozen=True)
class Options:
    """How to search.

    Attributes:
        method: finds a pattern for every mark.
        refinement: improves each of them.
        share: the budget in shares of what exhaustive greedy would forward; for the methods and
            refinements that keep to a budget.

    Raises:
        SearchError: a share that is not above 0 and at most 1.
    """

    method: Method = field(default_factory=Fast)
    refinement: Refinement = field(default_factory=Screened)
    share: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise SearchError(f"the budget's share must be above 0 and at most 1, got {self.share}")

    @classmethod
    def parse(cls, method: str, refinement: str = "none", share: float = 0.1) -> Options:
        """From names such as ``fast``, ``greedy:4`` (four blocks) and ``beam:8`` (eight wide).

        Raises:
            SearchError: an unknown name, or a number that does not belong to it.
        """
        return cls(
            _chosen("method", METHODS, method),
            _chosen("refinement", REFINEMENTS, refinement),
            share,
        )

    def in_words(self) -> str:
        """For provenance."""
        return ", ".join(filter(None, (self.method.in_words, self.refinement.in_words)))

    def budget(self, constraints: Constraints, targets: Targets, full_evaluation: int) -> int:
        """Tokens that a method and a refinement that keep to a budget may forward together.

        Args:
            constraints: of the search.
            targets: of the search.
            full_evaluation: tokens of one pattern on all the data.
        """
        exhaustive = evaluations(constraints, targets) * full_evaluation
        least = LEAST_EVALUATIONS_PER_LAYER * len(constraints.start) * full_evaluation
        return max(int(self.share * exhaustive), least)

    def expected_tokens(
        self, constraints: Constraints, targets: Targets, full_evaluation: int
    ) -> int | None:
        """Tokens of the whole search at most; None where nobody can say. See :meth:`budget`."""
        budget = self.budget(constraints, targets, full_evaluation)
        descent, refinement = self.divide(budget)
        found = self.method.tokens(constraints, targets, full_evaluation, descent)
        refined = self.refinement.tokens(refinement)
        return None if found is None or refined is None else found + refined

    def divide(self, budget: int) -> tuple[int, int]:
        """The method's part of a budget and the refinement's."""
        refinement = int(budget * REFINEMENT_SHARE)
        return budget - refinement, refinement


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

    What keeps to a budget is billed with the whole budget. A pattern with S layers prefills faster
    than the all-F rate that is usually at hand, so hours are an upper bound too.

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
    tokens = options.expected_tokens(constraints, targets, sequences * context)
    if tokens is None:
        raise SearchError(f"there is no cost model for: {options.in_words()}")
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
