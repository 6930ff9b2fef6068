"""Search in which one pass proposes patterns, exchanges improve one, and a student's loss decides.

A matrix of layer pairs says which layers may share. It differs a little between documents, and
ignores the effect of errors on later layers, and that another layer's list may copy better than a
layer's own. So the optima of documents, in every rating, are proposals, of which some are run. In
the best of them layers are exchanged: the F layer that is missed least becomes S, and the S layer
that helps most becomes F. The choice is by the loss of the text plus the divergence from all F, in
running text *and* where something far back is asked for. In running text alone it would choose
patterns that can no longer copy (benchmarks/results/smollm2/real-model.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

import numpy as np

from sglang_indexcache.lab.search.difference import Difference
from sglang_indexcache.lab.search.ledger import Ledger, Step
from sglang_indexcache.lab.search.methods.pairwise import Pairwise, most_similar, pair_matrices
from sglang_indexcache.lab.search.methods.proposal import Proposal, Sureness
from sglang_indexcache.lab.search.rules import Constraints, Mark, Targets
from sglang_indexcache.lab.stats.pairs import Floats
from sglang_indexcache.pattern import Pattern

PROPOSALS, LOOK = 4, 2
"""Number of proposals that are run for a target, and number of documents for that."""
EXCHANGED = 2
"""Number of layers that are exchanged in the best proposal."""
AGAIN = 8
"""Number of S layers that are tried for the second exchange: those that helped most in the
first."""


@dataclass(frozen=True)
class Decided:
    """Method that runs proposals by pairs, exchanges layers, and decides by a student's loss."""

    pairs: Pairwise

    objective, judges = "loss and KL to all F", True

    @property
    def in_words(self) -> str:
        """See :class:`~sglang_indexcache.lab.search.methods.Method`."""
        return (
            "loss and KL to all F, in text and recall, among exchanges of layers in proposals by "
            f"{self.pairs.in_words}"
        )

    def descend(self, ledger: Ledger, targets: Targets) -> Iterator[Step | Proposal]:
        """See :class:`~sglang_indexcache.lab.search.methods.Method`."""
        matrices = pair_matrices(ledger, self.pairs)
        ledger.judged(targets.constraints.start)
        for mark in targets.marks:
            exchanges = are_exchanged(targets.constraints, mark)
            yield decide(ledger, targets.constraints, mark, matrices, exchanges)

    def between(self, ledger: Ledger, targets: Targets, mark: Mark) -> Proposal:
        """See :class:`~sglang_indexcache.lab.search.methods.Method`."""
        matrices = pair_matrices(ledger, self.pairs)
        return decide(ledger, targets.constraints, mark, matrices, exchanges=False)

    def least(self, targets: Targets, batch_tokens: Sequence[int]) -> int:
        """See :class:`~sglang_indexcache.lab.search.methods.Method`."""
        first = self.pairs.least(targets, batch_tokens) + sum(batch_tokens)
        look = PROPOSALS * sum(batch_tokens[:LOOK])
        finals = 2 * sum(batch_tokens)
        tried = sum(_tried(targets.constraints, mark) for mark in targets.marks)
        return first + len(targets.marks) * (look + finals) + tried * max(batch_tokens)


def are_exchanged(constraints: Constraints, mark: Mark) -> bool:
    """Return whether exchanges are worth their cost: below 1/2, where proposals lose recall."""
    return 2 * mark.full_layers < len(constraints.start)


def _tried(constraints: Constraints, mark: Mark) -> int:
    """Return an upper bound for the number of patterns that exchanges try."""
    if not are_exchanged(constraints, mark):
        return 0
    leave = mark.full_layers - constraints.fewest
    come = len(constraints.start.full_layers) - mark.full_layers + EXCHANGED
    return EXCHANGED * leave + come + (EXCHANGED - 1) * AGAIN


def decide(
    ledger: Ledger, constraints: Constraints, mark: Mark, matrices: Floats, exchanges: bool = True
) -> Proposal:
    """Find the pattern for one mark.

    Args:
        matrices: ``[batches, M, N, N]``, for each document in each rating.
        exchanges: whether layers of the best proposal are exchanged.
    """
    proposed, votes = _proposed(matrices, mark.full_layers, constraints, ledger.tokens_of_batches)
    look = ledger.all_batches[:LOOK]
    run = _ranked(ledger, proposed[:PROPOSALS], look)
    finalists = run[:1]
    if exchanges:
        finalists += [exchanged(ledger, constraints, run[0])]
    best = _ranked(ledger, finalists, ledger.all_batches)[0]
    run = list(dict.fromkeys([*run, best]))
    losses = dict(zip(run, ledger.student_losses(run, look), strict=True))
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
    """Exchange the :data:`EXCHANGED` F layers that are missed least for the best other layers.

    Layers are removed before others are added, because a list that copies badly may hide one that
    copies well. Each choice uses another document.
    """
    batches = cycle(ledger.all_batches)
    rounds = min(EXCHANGED, len(constraints.candidates(pattern)))
    for _ in range(rounds):
        smaller = [constraints.flipped(pattern, n) for n in constraints.candidates(pattern)]
        pattern = _ranked(ledger, smaller, [next(batches)])[0]
    layers = constraints.restorable(pattern)
    for _ in range(rounds):
        larger = {constraints.flipped(pattern, layer): layer for layer in layers}
        pattern, *others = _ranked(ledger, [*larger], [next(batches)])
        layers = [larger[other] for other in others[:AGAIN]]
    return pattern


def _ranked(ledger: Ledger, patterns: Sequence[Pattern], batches: Sequence[int]) -> list[Pattern]:
    """Sort patterns by the student's loss on some documents, best first."""
    losses = ledger.student_losses(patterns, batches).mean(axis=1)
    return [patterns[n] for n in np.argsort(losses, kind="stable")]


def _proposed(
    matrices: Floats, full_layers: int, constraints: Constraints, tokens: Sequence[int]
) -> tuple[list[Pattern], Counter[Pattern]]:
    """Return the proposals, joint ones first, and how many documents each is optimal for."""
    together = np.average(matrices, axis=0, weights=tokens)
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
