"""Methods by which a search finds its patterns: each is one row of :data:`METHODS`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from sglang_indexcache.lab.search.ledger import Ledger, Step
from sglang_indexcache.lab.search.methods.fast import Descent
from sglang_indexcache.lab.search.methods.forward import Ascent
from sglang_indexcache.lab.search.methods.greedy import Greedy
from sglang_indexcache.lab.search.methods.pairwise import Pairwise
from sglang_indexcache.lab.search.rules import Proposal, Targets


class Method(Protocol):
    """Deterministic: over the same ledger contents it finds the same patterns."""

    @property
    def in_words(self) -> str:
        """For the provenance of what it finds."""

    @property
    def searches(self) -> int:
        """Number of searches that it makes; the default budget is for so many."""

    @property
    def by_loss(self) -> bool:
        """Whether losses decide, so that a refinement by loss belongs to it.

        If not, its cost is :meth:`least`, and its answers are measured on held-out data alone.
        """

    def descend(self, ledger: Ledger, targets: Targets, budget: int) -> Iterator[Step | Proposal]:
        """Yield the start as a step, if losses decide, then what it finds on its way.

        A step that arrives at a mark is an answer for it, too; whoever takes an answer measures it
        on all batches, and keeps the best of several.
        ``budget`` is in tokens, is :meth:`least` or more, and pays for everything that is asked
        for until the last mark's answer is measured.
        """

    def least(self, targets: Targets, batch_tokens: Sequence[int]) -> int:
        """Count the tokens that :meth:`descend` cannot do without; greedy takes exactly these.

        ``batch_tokens`` are those of each batch that is searched on.
        """


@dataclass(frozen=True)
class Walks:
    """Lazy greedy along several ways, in their order, with an equal share of the budget each.

    Attributes:
        start: gives each mark a first pattern, out of the same budget; the ways have to better it.
    """

    in_words: str
    ways: tuple[type[Descent], ...]
    by_loss: bool = True
    start: Pairwise | None = None

    @property
    def searches(self) -> int:
        """See :class:`Method`."""
        return len(self.ways)

    def descend(self, ledger: Ledger, targets: Targets, budget: int) -> Iterator[Step | Proposal]:
        """See :class:`Method`; the start comes once for each way."""
        end = ledger.spent + budget
        if self.start is not None:
            proposals = list(self.start.descend(ledger, targets, budget))
            start = targets.constraints.start
            yield ledger.step(start, start, None, candidates=1)
            yield from proposals
        ways = [descent(targets) for descent in self.ways]
        needs = [descent.least(ledger.tokens_of_batches) for descent in ways]
        for place, descent in enumerate(ways):
            remaining = end - ledger.spent
            share = min(remaining // (len(ways) - place), remaining - sum(needs[place + 1 :]))
            yield from descent.walk(ledger, max(needs[place], share))

    def least(self, targets: Targets, batch_tokens: Sequence[int]) -> int:
        """See :class:`Method`."""
        least = sum(descent(targets).least(batch_tokens) for descent in self.ways)
        if self.start is not None:  # it, all F, and a pattern for each mark
            least += self.start.least(targets, batch_tokens)
            least += (1 + len(targets.marks)) * sum(batch_tokens)
        return least


_HOW = "(lazy re-evaluation, paired racing)"
_ONE_PASS = Pairwise(
    "one-pass",
    "kept_mass",
    "share of its attention that the worst head keeps",
    "attention mass that each layer's worst head keeps under other layers' lists, by dynamic "
    "programme",
)
_FROM_LISTS = Pairwise(
    "one-pass",
    "kept_list",
    "share of its list that is kept, less the places copied from that are lost",
    "what each layer keeps of its list, and of the places that text is copied from, under other "
    "layers' lists, by dynamic programme",
)
METHODS: Mapping[str, Method] = {
    "both": Walks(f"the better of fast greedy and forward selection {_HOW}", (Descent, Ascent)),
    "fast": Walks(f"fast greedy {_HOW}", (Descent,)),
    "forward": Walks(f"forward selection {_HOW}", (Ascent,)),
    "greedy": Greedy(),
    "one-pass": _FROM_LISTS,
    "similarity": Pairwise(
        "similarity",
        "similarity",
        "cosine similarity of attention outputs",
        "similarity of attention outputs, by dynamic programme (the paper's appendix)",
    ),
}
"""By the names that a user gives.

Greedy from all F never sees two layers that are free to share together and costly to share alone:
whichever is tried first looks costly. From all S upwards such layers are simply left shared. On the
other hand the way up begins where the loss is highest and measurements say least. So "both" walks
both ways, and of each retention's two patterns the one with the lower loss on all calibration
batches is kept.
"""
_FROM_ONE_PASS = f"the best of one pass, fast greedy and forward selection {_HOW}"
METHODS_FROM_LISTS: Mapping[str, Method] = {
    **METHODS,
    "both": Walks(_FROM_ONE_PASS, (Descent, Ascent), start=_FROM_LISTS),
}
"""The same where servers return what their layers select."""
METHODS_IN_PROCESS: Mapping[str, Method] = {
    **METHODS,
    "one-pass": _ONE_PASS,
    "both": Walks(_FROM_ONE_PASS, (Descent, Ascent), start=_ONE_PASS),
}
"""The same where the model runs in this process, so that its layers can be seen.

"both" then has three patterns of each retention, the first by attention mass. It costs little, and
on a real model it kept what two lazy walks lost.
"""
