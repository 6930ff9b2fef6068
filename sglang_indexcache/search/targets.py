"""How far a search goes: by ratio, by count of F layers, or by a loss budget."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from sglang_indexcache.errors import SearchError
from sglang_indexcache.search.constraints import Constraints

_RATIO = re.compile(r"(\d+)/(\d+)")
_BUDGET = re.compile(r"\+(\d+(?:\.\d+)?)%")
_DEFAULT = ("1/2", "1/4", "1/8")


@dataclass(frozen=True)
class Mark:
    """A retention at which the search leaves a pattern.

    Attributes:
        full_layers: F layers left.
        label: the retention in words for names and figures, such as ``1/4``.
    """

    full_layers: int
    label: str


@dataclass(frozen=True)
class Targets:
    """Where a search leaves patterns and where it ends.

    Attributes:
        marks: most F layers first.
        loss_budget: largest allowed loss over the start pattern's, relative (0.005 is +0.5 %);
            None for no limit. The search ends before the flip that would exceed it.
    """

    marks: tuple[Mark, ...]
    loss_budget: float | None = None

    @property
    def fewest(self) -> int:
        """F layers at which the search ends at the latest."""
        return self.marks[-1].full_layers

    def mark_at(self, full_layers: int) -> Mark | None:
        """The mark with exactly this many F layers."""
        return next((mark for mark in self.marks if mark.full_layers == full_layers), None)

    def refuse_loss_budget(self, method: str) -> None:
        """For a method that does not stop where the loss exceeds it.

        Raises:
            SearchError: there is a loss budget.
        """
        if self.loss_budget is not None:
            raise SearchError(
                f"{method} cannot stop at a loss budget (+{100 * self.loss_budget:g}%). Give "
                "ratios or numbers of F layers, or search with --method fast or greedy."
            )


def parse_targets(values: Sequence[str] | None, constraints: Constraints) -> Targets:
    """Read what a user wrote.

    Args:
        values: each a ratio (``1/4``: a quarter of the layers, rounded up), a count of F layers
            (``12``), or a loss budget (``+0.5%``, at most one). A budget alone goes as far down
            as the constraints allow. None is 1/2, 1/4 and 1/8.
        constraints: the rules of the search.

    Raises:
        SearchError: a value that cannot be read or reached.
    """
    total, most = len(constraints.start), len(constraints.start.full_layers)
    marks: dict[int, Mark] = {}
    budgets: list[float] = []
    for value in _DEFAULT if values is None else values:
        if match := _BUDGET.fullmatch(value):
            budgets.append(float(match[1]) / 100)
            continue
        mark = _mark(value, total)
        if not constraints.fewest <= mark.full_layers <= most:
            raise SearchError(
                f"target {value} keeps {mark.full_layers} of {total} indexers, but this search "
                f"can only reach {constraints.fewest} to {most} (layer 0, forced layers and "
                "stage starts stay F; the checkpoint's own S layers and forced S stay S)"
            )
        marks.setdefault(mark.full_layers, mark)
    if len(budgets) > 1:
        raise SearchError("give at most one loss budget")
    if values is not None and not values:
        raise SearchError("give at least one target, such as 1/4, 12 or +0.5%")
    budget = budgets[0] if budgets else None
    if not marks:
        marks[constraints.fewest] = Mark(constraints.fewest, f"{constraints.fewest}/{total}")
    return Targets(tuple(sorted(marks.values(), key=lambda m: -m.full_layers)), budget)


def _mark(value: str, total: int) -> Mark:
    if match := _RATIO.fullmatch(value):
        above, below = int(match[1]), int(match[2])
        if not 0 < above <= below:
            raise SearchError(f"target {value} is not a ratio between 0 and 1")
        return Mark(math.ceil(Fraction(above, below) * total), value)
    if value.isdigit() and int(value) > 0:
        return Mark(int(value), f"{value}/{total}")
    raise SearchError(
        f"target {value!r} is neither a ratio (1/4) nor a count of F layers (12) nor a loss "
        "budget (+0.5%)"
    )
