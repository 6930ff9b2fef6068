"""Similarity-based search (paper, appendix "Similarity-based Pattern Search").

The paper reports it as a negative result: it is cheap and no better than uniform interleaving.
It is here to be compared with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from sglang_indexcache.errors import SearchError
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.evaluators import Floats
from sglang_indexcache.search.ledger import Ledger, Step
from sglang_indexcache.search.rules import Constraints, Targets


@dataclass(frozen=True)
class Similarity:
    """:func:`most_similar` as a row of :data:`~sglang_indexcache.search.methods.METHODS`."""

    in_words = "similarity matrix, exact dynamic programme"
    searches = 1

    def descend(
        self, ledger: Ledger, constraints: Constraints, targets: Targets, budget: int
    ) -> Iterator[Step | Pattern]:
        """See :class:`~sglang_indexcache.search.methods.Method`; goes straight to the marks.

        Raises:
            SearchError: the evaluator does not hand out attention outputs.
        """
        yield ledger.step(constraints.start, constraints.start, None, candidates=1)
        similarity = getattr(ledger.evaluator, "similarity", None)
        if similarity is None:
            raise SearchError(
                "the similarity matrix needs attention outputs, which an engine does not hand "
                "out. Use the transformers evaluator (leave --url away)."
            )
        matrix = similarity(list(ledger.all_batches))
        for mark in targets.marks:
            yield most_similar(matrix, mark.full_layers, constraints)

    def least(
        self, constraints: Constraints, targets: Targets, batch_tokens: Sequence[int]
    ) -> None:
        """See :class:`~sglang_indexcache.search.methods.Method`; the matrix is not evaluations.

        Raises:
            SearchError: the search has a recent window, of which the matrix knows nothing.
        """
        if constraints.window:
            raise SearchError(
                "the similarity of layers says nothing about a recent window. Search with another "
                "--method, or for targets without one."
            )


def most_similar(similarity: Floats, full_layers: int, constraints: Constraints) -> Pattern:
    """The pattern with the largest total similarity, exactly, by the appendix's recurrence.

    ``dp[i][k] = max_{j<i} dp[j][k-1] + sum_{m=j+1}^{i-1} S[m, j]``; the sum over the last group is
    the same with i one past the last layer.

    Args:
        similarity: ``[N, N]``; entry (i, j), j < i, is the similarity of layer i's attention
            output with its own indices and with layer j's.
        full_layers: M, the number of F layers.
        constraints: fixed layers are F, layers that are S in its start pattern stay S.

    Raises:
        SearchError: no pattern with M F layers satisfies the constraints.
    """
    count = len(constraints.start)
    if similarity.shape != (count, count):
        raise SearchError(f"the similarity matrix is {similarity.shape}, the model has {count}")
    allowed = [constraints.start.is_full(layer) for layer in range(count)]
    group = _group_values(similarity, constraints.fixed)
    best = np.full((count + 1, full_layers + 1), -np.inf)
    source = np.zeros((count + 1, full_layers + 1), dtype=np.int64)
    best[0, 1] = 0.0
    for kept in range(2, full_layers + 2):
        for layer in range(1, count + 1):
            at_end = layer == count
            if at_end != (kept == full_layers + 1) or (not at_end and not allowed[layer]):
                continue
            totals = best[:layer, kept - 1] + group[:layer, layer]
            source[layer, kept - at_end] = chosen = int(totals.argmax())
            best[layer, kept - at_end] = totals[chosen]
    if not np.isfinite(best[count, full_layers]):
        raise SearchError(f"no pattern with {full_layers} F layers satisfies the constraints")
    layers = [int(source[count, full_layers])]
    for kept in range(full_layers, 1, -1):
        layers.append(int(source[layers[-1], kept]))
    return constraints.keeping(layers)


def _group_values(similarity: Floats, fixed: frozenset[int]) -> Floats:
    """``[N, N+1]``: similarity gained where F layer j serves j+1..i-1; -inf if that is barred."""
    count = len(similarity)
    values = np.full((count, count + 1), -np.inf)
    for source in range(count):
        total = 0.0
        for end in range(source + 1, count + 1):
            values[source, end] = total
            if end in fixed:
                break
            if end < count:
                total += float(similarity[end, source])
    return values
