"""Search by pairs of layers: one matrix, and from it the best pattern of every size.

Entry (i, j) of the matrix says how well layer i does with layer j's list, without running any
pattern. The pattern whose S layers keep the most is then found exactly, for every target at once.
No loss is used. There are three matrices:

- The paper's (appendix "similarity-based pattern search"): the cosine similarity of attention
  outputs. The paper found its patterns no better than uniform interleaving.
- Ours: the share of its attention that the *worst* head of a layer keeps at the tokens that count,
  at the worst tenth of them and in the mean. Copying from far back is done by few heads at few
  places, whose losses do not show in a mean.
- The share of a layer's list that the other list holds, minus the share of places from which text
  is copied that it lacks. A server returns only lists, and their overlap alone ignores recall.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from sglang_indexcache.errors import SearchError
from sglang_indexcache.lab.search.evaluators import Floats, pair_forwards
from sglang_indexcache.lab.search.ledger import Ledger, Step
from sglang_indexcache.lab.search.methods.proposal import Proposal
from sglang_indexcache.lab.search.rules import Constraints, Mark, Targets
from sglang_indexcache.pattern import Pattern


@dataclass(frozen=True)
class Pairwise:
    """Method that finds patterns from one matrix of layer pairs by exact dynamic programming.

    Attributes:
        name: the method's name, for messages.
        kind: kind of the matrix, one of :data:`~sglang_indexcache.lab.search.evaluators.PAIRS`.
        label: label of an entry, in a figure.
    """

    name: str
    kind: str
    label: str
    in_words: str

    objective, judges = "", False

    @property
    def pairs(self) -> Pairwise:
        """See :class:`~sglang_indexcache.lab.search.methods.Method`."""
        return self

    def descend(self, ledger: Ledger, targets: Targets) -> Iterator[Step | Proposal]:
        """See :class:`~sglang_indexcache.lab.search.methods.Method`.

        Raises:
            SearchError: see :func:`pair_matrices`.
        """
        matrix = pair_matrix(ledger, self)
        for mark in targets.marks:
            yield Proposal(mark, most_similar(matrix, mark.full_layers, targets.constraints))

    def between(self, ledger: Ledger, targets: Targets, mark: Mark) -> None:
        """See :class:`~sglang_indexcache.lab.search.methods.Method`; this one judges none."""

    def least(self, targets: Targets, batch_tokens: Sequence[int]) -> int:
        """See :class:`~sglang_indexcache.lab.search.methods.Method`; this is its whole cost."""
        return pair_forwards(self.kind, len(targets.constraints.start)) * sum(batch_tokens)


def pair_matrices(ledger: Ledger, method: Pairwise) -> Floats:
    """Return the matrices of layer pairs of every batch that is searched on.

    Returns:
        ``[batches, M, N, N]`` float64 in M ratings, of which the first is the one to trust. Entry
        (i, j), j < i, of a matrix says how well layer i does with layer j's list. It is 1 on the
        diagonal and 0 above it.

    Raises:
        SearchError: the evaluator cannot compare layers in that way.
    """
    if not hasattr(ledger.evaluator, method.kind):
        raise SearchError(
            f"--method {method.name} looks into the model's layers, which a server does not "
            "show. Leave out --url, so that transformers runs the model in this process."
        )
    return np.stack([ledger.pairs(method.kind, batch) for batch in ledger.all_batches])


def pair_matrix(ledger: Ledger, method: Pairwise) -> Floats:
    """Return ``[N, N]``, the mean over batches of the first rating of :func:`pair_matrices`."""
    return averaged(ledger, pair_matrices(ledger, method)[:, 0])


def averaged(ledger: Ledger, matrices: Floats) -> Floats:
    """Average ``[batches, ...]`` matrices of all batches that are searched on, by their tokens."""
    return np.asarray(np.average(matrices, axis=0, weights=ledger.tokens_of_batches))


def most_similar(similarity: Floats, full_layers: int, constraints: Constraints) -> Pattern:
    """Return the pattern with the largest total similarity of its layers to the lists they use.

    The result is exact, by the appendix's recurrence ``dp[i][k] = max_{j<i} dp[j][k-1] +
    sum_{m=j+1}^{i-1} S[m, j]``; the last group's sum is the same with i one past the last layer.
    Among equally good patterns, the one whose last F layers come first is returned.

    Args:
        similarity: ``[N, N]``, as from :func:`pair_matrix`.
        full_layers: number of F layers that ``constraints`` allow.
    """
    count = len(similarity)
    gained = _gained(similarity, constraints)
    is_full = np.array([constraints.start.is_full(layer) for layer in range(count)])
    may_begin = np.tri(count + 1, count, -1, dtype=np.bool_) & is_full
    # best[i] is the largest total of layers before i in this many groups; choices hold the last
    # group's start.
    best, choices = np.full(count, -np.inf), []
    best[0] = 0.0
    for _ in range(full_layers):
        totals = np.where(may_begin, gained + best, -np.inf)
        choices.append(totals.argmax(axis=1))
        best = totals.max(axis=1)[:count]
    full, end = [], count
    for begins in reversed(choices):
        end = int(begins[end])
        full.append(end)
    return constraints.keeping(full)


def _gained(similarity: Floats, constraints: Constraints) -> Floats:
    """Return the total that a group keeps, by its end and its first layer.

    Returns:
        ``[N + 1, N]``; entry (i, j) is the sum over layers j + 1 to i - 1 with j's list, or -inf if
        one of these layers must be F.
    """
    count = len(similarity)
    fixed = [layer for layer in constraints.fixed if layer]
    part = np.tril(similarity, -1)
    part[fixed, :] = -np.inf
    part[np.triu_indices(count)] = 0
    return np.vstack([np.zeros(count), part.cumsum(axis=0)])
