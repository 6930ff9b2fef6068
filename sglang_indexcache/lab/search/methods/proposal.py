"""A pattern that a search finds for a mark, and its sureness of each layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sglang_indexcache.lab.search.difference import Difference
from sglang_indexcache.lab.search.rules import Mark
from sglang_indexcache.pattern import Pattern


@dataclass(frozen=True)
class Sureness:
    """Sureness of a search about an F layer.

    Attributes:
        share: of the proposals by single documents that have it.
        without: what the best pattern that was run without it adds to the divergence, in nats;
            None if none was run.
    """

    share: float
    without: Difference | None

    @property
    def is_sure(self) -> bool:
        """Whether every document wants it, or doing without was seen to be worse."""
        return self.share == 1 or (self.without is not None and self.without.low > 0)


@dataclass(frozen=True)
class Proposal:
    """A pattern that was found for a mark.

    Attributes:
        layers: sureness of each F layer but the first; empty where nothing was run.
    """

    mark: Mark
    pattern: Pattern
    layers: Mapping[int, Sureness] = field(default_factory=dict)
