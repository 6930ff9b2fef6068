"""One pass proposes some patterns, and the divergence from all F decides among them.

A matrix of layer pairs says which layers may share. It differs a little from document to document,
and knows nothing of what errors do in the layers above. So the optimum of every document's own
matrix, in every rating, is a proposal, as are those of all documents together; each is run. The KL
divergence of all F's next tokens from the pattern's decides, in text *and* where something far back
is asked for: in text alone it picks patterns that cannot copy any more
(benchmarks/results/smollm2/real-model.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sglang_indexcache.lab.search.difference import Difference
from sglang_indexcache.lab.search.ledger import Ledger, Step
from sglang_indexcache.lab.search.methods.greedy import evaluations
from sglang_indexcache.lab.search.methods.pairwise import Pairwise, most_similar, pair_matrices
from sglang_indexcache.lab.search.methods.proposal import Proposal, Sureness
from sglang_indexcache.lab.search.rules import Constraints, Mark, Targets
from sglang_indexcache.lab.stats.pairs import Floats
from sglang_indexcache.pattern import Pattern

SHARE = 0.05
"""Share of Algorithm 1's tokens that proposals may take, but for models of few layers."""
MOST, FEWEST = 12, 3
"""Proposals of a target."""
FINALISTS = 2
"""Proposals that are run on all documents; the others on the first quarter of them."""


@dataclass(frozen=True)
class Decided:
    """Run what a search by pairs proposes, and take what stays nearest to all F."""

    proposer: Pairwise
    by_loss: bool = False

    @property
    def in_words(self) -> str:
        """See :class:`~sglang_indexcache.lab.search.methods.Method`."""
        return f"KL to all F, in text and recall, among proposals by {self.proposer.in_words}"

    def descend(self, ledger: Ledger, targets: Targets) -> Iterator[Step | Proposal]:
        """See :class:`~sglang_indexcache.lab.search.methods.Method`."""
        matrices = pair_matrices(ledger, self.proposer)
        ledger.judged(targets.constraints.start)
        most = proposals_of_a_target(targets, ledger.tokens_of_batches)
        for mark in targets.marks:
            yield decide(ledger, targets.constraints, mark, matrices, most)

    def least(self, targets: Targets, batch_tokens: Sequence[int]) -> int:
        """See :class:`~sglang_indexcache.lab.search.methods.Method`."""
        most = proposals_of_a_target(targets, batch_tokens)
        of_a_target = _cost(most, batch_tokens)
        first = self.proposer.least(targets, batch_tokens) + sum(batch_tokens)
        return first + len(targets.marks) * of_a_target


def proposals_of_a_target(targets: Targets, batch_tokens: Sequence[int]) -> int:
    """Return how many proposals may be run for each target within :data:`SHARE`."""
    full = sum(batch_tokens)
    allowed = (SHARE * evaluations(targets) - 2) * full / (len(targets.marks) + 1)
    fitting = [n for n in range(FEWEST, MOST + 1) if _cost(n, batch_tokens) <= allowed]
    return max(fitting, default=FEWEST)


def _cost(proposals: int, batch_tokens: Sequence[int]) -> int:
    """Count the tokens of running so many proposals, the finalists on all batches."""
    first = sum(batch_tokens[: first_look(len(batch_tokens))])
    finalists = min(FINALISTS, proposals)
    return proposals * first + finalists * (sum(batch_tokens) - first)


def first_look(batches: int) -> int:
    """Return on how many batches each proposal is run: a quarter, two at least."""
    return min(batches, max(2, batches // 4))


def decide(
    ledger: Ledger, constraints: Constraints, mark: Mark, matrices: Floats, most: int
) -> Proposal:
    """Find the pattern of one mark.

    Args:
        matrices: ``[batches, M, N, N]``, of each document in each rating.
        most: proposals that are run.
    """
    proposed, votes = _proposed(matrices, mark.full_layers, constraints, ledger.tokens_of_batches)
    chosen = proposed[:most]
    look = ledger.all_batches[: first_look(len(ledger.all_batches))]
    distances = {pattern: _distances(ledger, pattern, look) for pattern in chosen}
    finalists = sorted(chosen, key=lambda pattern: float(distances[pattern].mean()))[:FINALISTS]
    best = min(finalists, key=lambda p: float(_distances(ledger, p, ledger.all_batches).mean()))
    documents = ledger.documents_of(look)
    layers = {
        layer: Sureness(
            sum(n for pattern, n in votes.items() if pattern.is_full(layer)) / votes.total(),
            _without(layer, best, distances, documents),
        )
        for layer in best.full_layers
        if layer not in constraints.fixed
    }
    return Proposal(mark, best, layers)


def _proposed(
    matrices: Floats, full_layers: int, constraints: Constraints, tokens: Sequence[int]
) -> tuple[list[Pattern], Counter[Pattern]]:
    """Return the proposals, the joint ones first, and how many documents each is the optimum of."""
    together = np.average(matrices, axis=0, weights=tokens)
    first = [most_similar(matrix, full_layers, constraints) for matrix in together]
    votes = Counter(
        most_similar(matrix, full_layers, constraints) for of_one in matrices for matrix in of_one
    )
    return list(dict.fromkeys([*first, *(pattern for pattern, _ in votes.most_common())])), votes


def _distances(ledger: Ledger, pattern: Pattern, batches: Sequence[int]) -> Floats:
    """Return ``[batches]`` divergences from all F, in nats."""
    return np.array([judged.distance for judged in ledger.judged(pattern, batches)])


def _without(
    layer: int, best: Pattern, distances: Mapping[Pattern, Floats], documents: Sequence[int]
) -> Difference | None:
    """Compare the best pattern that was run without a layer with the one that was chosen."""
    lacking = [each for pattern, each in distances.items() if not pattern.is_full(layer)]
    if not lacking or len(set(documents)) < 2:
        return None
    return Difference.of(min(lacking, key=lambda each: each.mean()) - distances[best], documents)
