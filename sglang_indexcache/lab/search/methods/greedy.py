"""The paper's greedy layer selection: Algorithm 1."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sglang_indexcache.lab.search.ledger import Ledger, Step
from sglang_indexcache.lab.search.rules import Mark, Targets


class Greedy:
    """Method that flips F layers to S one by one, each time with the lowest resulting loss.

    Ties go to the lowest layer.
    """

    in_words = "exhaustive greedy (Algorithm 1)"
    objective, judges, pairs = "language-modelling loss", False, None

    def descend(self, ledger: Ledger, targets: Targets) -> Iterator[Step]:
        """See :class:`~.methods.Method`."""
        constraints, pattern = targets.constraints, targets.constraints.start
        yield ledger.step(pattern, pattern, None, candidates=1)
        while len(pattern.full_layers) > targets.fewest:
            layers = constraints.candidates(pattern)
            tried = [constraints.flipped(pattern, layer) for layer in layers]
            added = ledger.candidates(pattern, tried)
            layer = layers[int(added.mean(axis=1).argmin())]  # Algorithm 1, line 4
            pattern = constraints.flipped(pattern, layer)
            yield ledger.step(constraints.start, pattern, layer, candidates=len(layers))

    def between(self, ledger: Ledger, targets: Targets, mark: Mark) -> None:
        """See :class:`~sglang_indexcache.lab.search.methods.Method`; it finds only its targets."""

    def least(self, targets: Targets, batch_tokens: Sequence[int]) -> int:
        """See :class:`~sglang_indexcache.lab.search.methods.Method`; this is its whole cost."""
        return evaluations(targets) * sum(batch_tokens)


def evaluations(targets: Targets) -> int:
    """Return an upper bound for the full evaluations of :class:`Greedy`, including the start."""
    constraints, start = targets.constraints, targets.constraints.start
    candidates, flips = len(constraints.candidates(start)), len(start.full_layers) - targets.fewest
    return 1 + sum(candidates - flip for flip in range(flips))
