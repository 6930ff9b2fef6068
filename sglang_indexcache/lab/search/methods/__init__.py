"""Methods by which a search finds its patterns, each of which is one row of :data:`METHODS`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from sglang_indexcache.errors import SearchError
from sglang_indexcache.lab.search.ledger import Ledger, Step
from sglang_indexcache.lab.search.methods.decided import Decided
from sglang_indexcache.lab.search.methods.greedy import Greedy
from sglang_indexcache.lab.search.methods.pairwise import Pairwise
from sglang_indexcache.lab.search.methods.proposal import Proposal
from sglang_indexcache.lab.search.rules import Mark, Targets

DEFAULT = "proposals"
"""Name of the default method."""


class Method(Protocol):
    """Method of a search. It is deterministic: the same ledger contents give the same patterns."""

    @property
    def in_words(self) -> str:
        """Description for the provenance of found patterns."""

    @property
    def objective(self) -> str:
        """Measure on the counted tokens by which it decides; empty if it runs no pattern."""

    @property
    def judges(self) -> bool:
        """Whether it runs the patterns that it finds, and compares them with all F."""

    @property
    def pairs(self) -> Pairwise | None:
        """Search by pairs of layers that it is or begins with, if any, whose matrix is drawn."""

    def descend(self, ledger: Ledger, targets: Targets) -> Iterator[Step | Proposal]:
        """Yield the start as a step, if losses decide, then its steps and proposals.

        A step that arrives at a mark is the answer for that mark.
        """

    def between(self, ledger: Ledger, targets: Targets, mark: Mark) -> Proposal | None:
        """Find the pattern of a mark between two targets; None if it :attr:`judges` none."""

    def least(self, targets: Targets, batch_tokens: Sequence[int]) -> int:
        """Return an upper bound for the tokens that :meth:`descend` asks for.

        ``batch_tokens`` has the tokens of each batch that is searched on.
        """


_BY_ATTENTION = Pairwise(
    "one-pass",
    "kept_mass",
    "share of its attention that the worst head keeps at nine tenths of places",
    "attention mass that each layer's worst head keeps at its worst tenth of places under other "
    "layers' lists, by dynamic programme",
)
_BY_LISTS = Pairwise(
    "one-pass",
    "kept_list",
    "share of its list that is kept, less the places copied from that are lost",
    "what each layer keeps of its list, and of the places that text is copied from, under other "
    "layers' lists, by dynamic programme",
)
SIMILARITY = Pairwise(
    "similarity",
    "similarity",
    "cosine similarity of attention outputs",
    "similarity of attention outputs, by dynamic programme (the paper's appendix)",
)
METHODS: Mapping[str, Method] = {
    DEFAULT: Decided(_BY_ATTENTION),
    "one-pass": _BY_ATTENTION,
    "similarity": SIMILARITY,
    "greedy": Greedy(),
}
"""Methods by the names that a user gives, where the model runs in this process."""
METHODS_OF_SERVERS: Mapping[str, Method] = {
    **METHODS,
    DEFAULT: Decided(_BY_LISTS),
    "one-pass": _BY_LISTS,
}
"""Methods by name for servers, which return no more than their layers' lists."""


def find_method(name: str | None, methods: Mapping[str, Method] = METHODS) -> Method:
    """Return a method by its name; None is the default.

    Raises:
        SearchError: no method has that name.
    """
    name = DEFAULT if name is None else name
    if name not in methods:
        raise SearchError(f"method {name!r} is unknown; there are {', '.join(methods)}")
    return methods[name]
