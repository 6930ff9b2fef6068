"""A pattern that a search proposes for a mark, with the sureness of each layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from sglang_indexcache.lab.search.rules import Mark
from sglang_indexcache.pattern import Pattern


@dataclass(frozen=True)
class Added:
    """Mixed loss in nats that a pattern is predicted to add to another's; a 95 % interval."""

    mean: float
    low: float
    high: float

    def numbers(self) -> dict[str, float]:
        """Return the mean and its interval as plain data."""
        return {name: round(value, 6) for name, value in asdict(self).items()}


@dataclass(frozen=True)
class Sureness:
    """Sureness of a search that a layer must be F.

    Attributes:
        share: share of the proposals from single documents in which the layer is F.
        without: what the best exchange of this F layer is predicted to add; None if there is none.
    """

    share: float
    without: Added | None

    @property
    def is_sure(self) -> bool:
        """Whether every document proposes this F layer, or any exchange of it would be worse."""
        return self.share == 1 or (self.without is not None and self.without.low > 0)


@dataclass(frozen=True)
class Proposal:
    """A pattern that was proposed for a mark.

    Attributes:
        layers: sureness of each F layer but the first; empty if nothing was run.
    """

    mark: Mark
    pattern: Pattern
    layers: Mapping[int, Sureness] = field(default_factory=dict)
