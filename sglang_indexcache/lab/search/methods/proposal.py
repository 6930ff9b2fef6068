"""A pattern that a search proposes for a mark, with the sureness of each layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sglang_indexcache.lab.search.difference import Difference
from sglang_indexcache.lab.search.rules import Mark
from sglang_indexcache.pattern import Pattern


@dataclass(frozen=True)
class Sureness:
    """Sureness of a search that a layer must be F.

    Attributes:
        share: share of the proposals from single documents in which the layer is F.
        without: mixed loss in nats that the best pattern without this F layer adds; None if no
            such pattern was run.
    """

    share: float
    without: Difference | None

    @property
    def is_sure(self) -> bool:
        """Whether every document proposes this F layer, or omitting it was measured to be worse."""
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
