"""The paper's similarity-based pattern search (its appendix of that name).

A layer's attention output with the indices of an earlier layer is compared with its output with its
own. The pattern whose S layers keep the most similarity is then found exactly, for every target at
once. No loss decides, and the paper found such patterns no better than uniform interleaving; a
search by loss (``greedy``, ``fast``) is what it recommends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from sglang_indexcache.errors import SearchError
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.evaluators import Floats, similarity_forwards
from sglang_indexcache.search.ledger import Ledger, Step
from sglang_indexcache.search.rules import Constraints, Targets


class Similarity:
    """Find the patterns by one similarity matrix and the exact dynamic programme."""

    in_words = "similarity of attention outputs, by dynamic programme (the paper's appendix)"
    searches = 1
    is_refined = False

    def descend(self, ledger: Ledger, targets: Targets, budget: int) -> Iterator[Step | Pattern]:
        """See :class:`~sglang_indexcache.search.methods.Method`; it has no choice but its cost.

        Raises:
            SearchError: a served model, whose layers' outputs cannot be seen; a recent window.
        """
        constraints = targets.constraints
        if not hasattr(ledger.evaluator, "similarity"):
            raise SearchError(
                "--method similarity looks into the model's layers, which a server does not show. "
                "Leave out --url, so that transformers runs the model in this process."
            )
        if constraints.window:
            raise SearchError(
                "--method similarity compares lists without a recent window. Leave +wN out of "
                "--target, or search with another method."
            )
        yield ledger.step(constraints.start, constraints.start, None, candidates=1)
        similarity = similarity_matrix(ledger)
        for mark in targets.marks:
            yield most_similar(similarity, mark.full_layers, constraints)

    def least(self, targets: Targets, batch_tokens: Sequence[int]) -> int:
        """See :class:`~sglang_indexcache.search.methods.Method`; this is its whole cost."""
        patterns = 1 + len(targets.marks)
        forwards = similarity_forwards(len(targets.constraints.start))
        return (patterns + forwards) * sum(batch_tokens)


def similarity_matrix(ledger: Ledger) -> Floats:
    """Return the similarity of attention outputs over all batches that are searched on.

    Returns:
        ``[N, N]`` float64; entry (i, j), j < i, is the mean cosine similarity over all queries
        between layer i's output with its own indices and with layer j's. 1 on the diagonal, 0 above
        it.
    """
    matrices = np.stack([ledger.similarity(batch) for batch in ledger.all_batches])
    return np.asarray(np.average(matrices, axis=0, weights=ledger.tokens_of_batches))


def most_similar(similarity: Floats, full_layers: int, constraints: Constraints) -> Pattern:
    """Return the pattern with the largest total similarity of its S layers to their F layers.

    Exact, by the appendix's recurrence ``dp[i][k] = max_{j<i} dp[j][k-1] + sum_{m=j+1}^{i-1}
    S[m, j]``; the last group's sum is the same with i one past the last layer. Ties go to the lower
    layer.

    Args:
        similarity: ``[N, N]``, as :func:`similarity_matrix` returns it.
        full_layers: number of F layers that ``constraints`` allow.
    """
    count, start = len(similarity), constraints.start
    # [i, j]: what layers j + 1 to i - 1 gain from layer j; nothing if one of them must be F.
    shared = np.tril(similarity, -1)
    shared[[layer for layer in constraints.fixed if layer], :] = -np.inf
    shared[np.triu_indices(count)] = 0
    gained = np.vstack([np.zeros(count), shared.cumsum(axis=0)])
    before = np.tri(count + 1, count, -1, dtype=bool)
    may_be_full = np.array([start.is_full(layer) for layer in range(count)])
    best = np.where(np.arange(count) == 0, 0.0, -np.inf)  # if layer j is the last F layer so far
    choices = []
    for _ in range(full_layers):
        totals = np.where(before, gained + best, -np.inf)
        choices.append(totals.argmax(axis=1))
        best = np.where(may_be_full, totals.max(axis=1)[:count], -np.inf)
    layers = [count]
    for chosen in reversed(choices):
        layers.append(int(chosen[layers[-1]]))
    return constraints.keeping(layers[1:])
