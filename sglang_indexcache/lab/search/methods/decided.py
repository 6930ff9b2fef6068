"""Search in which one pass proposes patterns, exchanges improve one, and the mixed loss decides.

A matrix of layer pairs says which layers may share. It differs a little between documents, and
ignores the effect of errors on later layers, and that another layer's list may copy better than a
layer's own. So the optima of documents, in every rating, are proposals, of which some are run. In
the best of them layers are exchanged: the F layers that are missed least become S, and the S layers
that help most *together* become F, because what two lists add may be the same.

The mixed loss decides: as much in running text as in passages that come again, and as in keys and
rules. Divergence from all F does not decide, because lists that copy better than a layer's own also
diverge; running text alone would choose patterns that can no longer copy
(benchmarks/results/smollm2/real-model.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, cycle
from math import comb

import numpy as np

from sglang_indexcache.lab.search.difference import Difference
from sglang_indexcache.lab.search.ledger import Ledger, Step
from sglang_indexcache.lab.search.methods.pairwise import (
    Pairwise,
    averaged,
    most_similar,
    pair_matrices,
)
from sglang_indexcache.lab.search.methods.proposal import Proposal, Sureness
from sglang_indexcache.lab.search.rules import Constraints, Mark, Targets
from sglang_indexcache.lab.stats.pairs import Floats
from sglang_indexcache.pattern import Pattern

PROPOSALS, LOOK = 4, 2
"""Number of proposals that are run for a target, and number of documents for that."""
EXCHANGED = 3
"""Most layers that are exchanged in the best proposal; of few layers, half."""
PAIRED, AGAIN = 6, 10
"""Numbers of S layers, those that help most alone, of which every two are tried together, and of
which each is tried after that."""


@dataclass(frozen=True)
class Decided:
    """Method that runs proposals by pairs, exchanges layers, and decides by the mixed loss."""

    pairs: Pairwise

    objective, judges = "mean over kinds of the loss", True

    @property
    def in_words(self) -> str:
        """See :class:`~sglang_indexcache.lab.search.methods.Method`."""
        return (
            "loss, in text and recall alike, among exchanges of layers in proposals by "
            f"{self.pairs.in_words}"
        )

    def descend(self, ledger: Ledger, targets: Targets) -> Iterator[Step | Proposal]:
        """See :class:`~sglang_indexcache.lab.search.methods.Method`."""
        matrices = pair_matrices(ledger, self.pairs)
        ledger.judged(targets.constraints.start)
        smaller = None
        for mark in reversed(targets.marks):
            completed = None if are_exchanged(targets, mark) else smaller
            proposal = decide(ledger, targets.constraints, mark, matrices, completed)
            smaller = proposal.pattern
            yield proposal

    def between(self, ledger: Ledger, targets: Targets, mark: Mark, smaller: Pattern) -> Proposal:
        """See :class:`~sglang_indexcache.lab.search.methods.Method`."""
        return decide(ledger, targets.constraints, mark, pair_matrices(ledger, self.pairs), smaller)

    def least(self, targets: Targets, batch_tokens: Sequence[int]) -> int:
        """See :class:`~sglang_indexcache.lab.search.methods.Method`."""
        first = self.pairs.least(targets, batch_tokens) + sum(batch_tokens)
        look = PROPOSALS * sum(batch_tokens[:LOOK])
        finals = 2 * sum(batch_tokens)
        exchanged_marks = [mark for mark in targets.marks if are_exchanged(targets, mark)]
        tried = sum(_tried(targets.constraints, mark) for mark in exchanged_marks)
        return first + len(targets.marks) * (look + finals) + tried * max(batch_tokens)


def are_exchanged(targets: Targets, mark: Mark) -> bool:
    """Return whether layers are exchanged: below 1/2, and where no smaller pattern is searched.

    The more F layers, the more exchanges there are to try, and the less there is to gain.
    """
    is_smallest = mark.full_layers == targets.fewest
    return is_smallest or 2 * mark.full_layers < len(targets.constraints.start)


def _exchanges(constraints: Constraints, full_layers: int) -> int:
    """Return how many layers are exchanged: half of those that may become S, but not many."""
    return min(EXCHANGED, -(-(full_layers - constraints.fewest) // 2))


def _tried(constraints: Constraints, mark: Mark) -> int:
    """Return an upper bound for the forwards of one document that exchanges take."""
    rounds = _exchanges(constraints, mark.full_layers)
    leave = rounds * (mark.full_layers - constraints.fewest)
    come = len(constraints.start.full_layers) - mark.full_layers + rounds
    added = [come, comb(PAIRED, 2), AGAIN][:rounds]
    return leave + sum(count + (count + 1) // 2 for count in added)


def decide(
    ledger: Ledger, constraints: Constraints, mark: Mark, matrices: Floats, smaller: Pattern | None
) -> Proposal:
    """Find the pattern for one mark.

    Args:
        matrices: ``[batches, M, N, N]``, for each document in each rating.
        smaller: found pattern with fewer F layers, whose best completions are proposed first; None
            if layers of the best proposal are exchanged instead.
    """
    count, together = mark.full_layers, averaged(ledger, matrices)
    proposed, votes = _proposed(matrices, together, count, constraints)
    if smaller is not None:
        kept = replace(constraints, fixed=constraints.fixed | {*smaller.full_layers})
        completed = [most_similar(matrix, count, kept) for matrix in together]
        proposed = [*dict.fromkeys([*completed, *proposed])]
    look = ledger.all_batches[:LOOK]
    run = _ranked(ledger, proposed[:PROPOSALS], look)
    finalists = run[:1]
    if smaller is None:
        finalists += [exchanged(ledger, constraints, run[0])]
    best = _ranked(ledger, finalists, ledger.all_batches)[0]
    run = list(dict.fromkeys([*run, best]))
    losses = dict(zip(run, ledger.mixed_losses(run, look), strict=True))
    documents = ledger.documents_of(look)
    layers = {
        layer: Sureness(
            sum(n for pattern, n in votes.items() if pattern.is_full(layer)) / votes.total(),
            _without(layer, best, losses, documents),
        )
        for layer in best.full_layers
        if layer not in constraints.fixed
    }
    return Proposal(mark, best, layers)


def exchanged(ledger: Ledger, constraints: Constraints, pattern: Pattern) -> Pattern:
    """Exchange the F layers that are missed least for the S layers that help most together.

    Layers are removed before others are added, because a list that copies badly may hide one that
    copies well. Each choice begins with another document.
    """
    documents = cycle(ledger.all_batches)
    rounds = _exchanges(constraints, len(pattern.full_layers))
    if not rounds:
        return pattern
    for _ in range(rounds):
        smaller = [constraints.flipped(pattern, n) for n in constraints.candidates(pattern)]
        pattern = _ranked(ledger, smaller, [next(documents)])[0]

    def added(groups: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Sort groups of S layers by the loss with all of a group F."""
        larger = {constraints.keeping({*pattern.full_layers, *group}): group for group in groups}
        ranked = _ranked_twice(ledger, [*larger], next(documents), next(documents))
        return [larger[each] for each in ranked]

    alone = added((layer,) for layer in constraints.restorable(pattern))
    chosen = alone[0]
    if rounds > 1:
        chosen = added(a + b for a, b in combinations(alone[:PAIRED], 2))[0]
    for _ in range(rounds - 2):
        chosen = added(chosen + one for one in alone[:AGAIN] if one[0] not in chosen)[0]
    return constraints.keeping({*pattern.full_layers, *chosen})


def _ranked(ledger: Ledger, patterns: Sequence[Pattern], batches: Sequence[int]) -> list[Pattern]:
    """Sort patterns by the mixed loss on some documents, best first."""
    losses = ledger.mixed_losses(patterns, batches).mean(axis=1)
    return [patterns[n] for n in np.argsort(losses, kind="stable")]


def _ranked_twice(
    ledger: Ledger, patterns: Sequence[Pattern], first: int, second: int
) -> list[Pattern]:
    """Sort patterns by one document, and the better half of them again by two."""
    order = _ranked(ledger, patterns, [first])
    half = (len(order) + 1) // 2
    return _ranked(ledger, order[:half], [first, second]) + order[half:]


def _proposed(
    matrices: Floats, together: Floats, full_layers: int, constraints: Constraints
) -> tuple[list[Pattern], Counter[Pattern]]:
    """Return the proposals, joint ones first, and how many documents each is optimal for."""
    first = [most_similar(matrix, full_layers, constraints) for matrix in together]
    votes = Counter(
        most_similar(matrix, full_layers, constraints) for of_one in matrices for matrix in of_one
    )
    return list(dict.fromkeys([*first, *(pattern for pattern, _ in votes.most_common())])), votes


def _without(
    layer: int, best: Pattern, losses: Mapping[Pattern, Floats], documents: Sequence[int]
) -> Difference | None:
    """Compare the best pattern that was run without a layer with the chosen pattern."""
    lacking = [each for pattern, each in losses.items() if not pattern.is_full(layer)]
    if not lacking or len(set(documents)) < 2:
        return None
    return Difference.of(min(lacking, key=lambda each: each.mean()) - losses[best], documents)
