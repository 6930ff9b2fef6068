"""Search by pairs of layers: one matrix, and the best pattern of every cost by one programme.

Entry (i, j) of the matrix says how well layer i does with layer j's list, without any pattern being
run. The pattern whose S layers keep the most is then found exactly, for every target at once. No
loss decides. Three matrices are known:

- The paper's (appendix "similarity-based pattern search"): the cosine similarity of attention
  outputs. The paper found its patterns no better than uniform interleaving.
- What the *worst* head of a layer keeps of its attention at the tokens that count, ours. Copying
  from far back is the work of few heads: the mean over heads does not see what they lose.
- The share of a layer's list that the other one holds, less what it lacks of the places that text
  is copied from. A server shows no more than lists, and their overlap alone is blind to recall.

The second one also says what a layer keeps under folded lists, its own among them. With a price for
an L layer the same programme then chooses among F, L and S.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_indexcache.errors import SearchError
from sglang_indexcache.pattern import FOLDED, FULL, SHARED, Pattern, Suffix
from sglang_indexcache.search.evaluators import Floats, pair_forwards
from sglang_indexcache.search.ledger import Ledger, Step
from sglang_indexcache.search.rules import Constraints, Proposal, Targets


@dataclass(frozen=True)
class Pairwise:
    """Find the patterns by one matrix of layer pairs and the exact dynamic programme.

    Attributes:
        name: of the method, for messages.
        kind: of the matrix, one of :data:`~sglang_indexcache.search.evaluators.PAIRS`.
        label: of an entry, in a figure.
    """

    name: str
    kind: str
    label: str
    in_words: str
    searches: int = 1
    by_loss: bool = False

    def descend(self, ledger: Ledger, targets: Targets, budget: int) -> Iterator[Step | Proposal]:
        """See :class:`~sglang_indexcache.search.methods.Method`; it has no choice but its cost.

        Raises:
            SearchError: a served model, whose layers cannot be seen.
        """
        constraints = targets.constraints
        if not hasattr(ledger.evaluator, self.kind):
            raise SearchError(
                f"--method {self.name} looks into the model's layers, which a server does not "
                "show. Leave out --url, so that transformers runs the model in this process."
            )
        matrix = pair_matrix(ledger, self.kind_for(constraints))
        for mark in targets.marks:
            yield Proposal(mark, most_similar(matrix, mark.full_layers, constraints))

    def least(self, targets: Targets, batch_tokens: Sequence[int]) -> int:
        """See :class:`~sglang_indexcache.search.methods.Method`; this is its whole cost."""
        constraints = targets.constraints
        return pair_forwards(self.kind_for(constraints), len(constraints.start)) * sum(batch_tokens)

    def kind_for(self, constraints: Constraints) -> str:
        """Return the kind of matrix that the letters of a search need."""
        return self.kind if constraints.folding is None else "folded_mass"


def pair_matrix(ledger: Ledger, kind: str) -> Floats:
    """Return the mean matrix of layer pairs over all batches that are searched on.

    Returns:
        ``[N, N]`` float64; entry (i, j), j < i, says how well layer i does with layer j's list, as
        the evaluator's method ``kind`` does of one batch. 1 on the diagonal, 0 above it. Of
        ``folded_mass`` ``[N, 2 N]``: folded lists first, with its own on the diagonal.
    """
    matrices = np.stack([ledger.pairs(kind, batch) for batch in ledger.all_batches])
    return np.asarray(np.average(matrices, axis=0, weights=ledger.tokens_of_batches))


def most_similar(similarity: Floats, full_layers: int, constraints: Constraints) -> Pattern:
    """Return the pattern with the largest total similarity of its layers to the lists they use.

    Exact, by the appendix's recurrence ``dp[i][k] = max_{j<i} dp[j][k-1] + sum_{m=j+1}^{i-1}
    S[m, j]``; the last group's sum is the same with i one past the last layer. With L layers dp
    counts these, too, and the sum of a group that L begins has S[j, j] in it. Of patterns as good
    the cheapest is returned, of F and S alone the one whose last F layers come first.

    Args:
        similarity: ``[N, N]``, as :func:`pair_matrix` returns it; ``[N, 2 N]`` if the constraints
            have :class:`~sglang_indexcache.search.rules.Folding`.
        full_layers: number of F layers that ``constraints`` allow; with folding the most that the
            pattern may cost, in F layers.
    """
    count, folding = len(similarity), constraints.folding
    gained, may_begin = _groups(similarity, constraints)
    columns = np.arange(gained.shape[1])
    before = np.arange(count + 1)[:, None] > columns % count
    # By the numbers of F and L layers before layer i: the most that the layers before it keep, and
    # the column of the last group.
    values: dict[tuple[int, int], Floats] = {}
    choices: dict[tuple[int, int], NDArray[np.intp]] = {}
    nothing = np.full(count + 1, -np.inf)
    for exact, folded in _counts(full_layers, constraints):
        ends = [values.get((exact - 1, folded), nothing)[:count]]  # the last group begins with F
        if folding is not None:
            ends.insert(0, values.get((exact, folded - 1), nothing)[:count])
        best = np.concatenate(ends)
        if (exact, folded) == (1, 0):
            best[-count] = 0.0
        totals = np.where(before, gained + np.where(may_begin, best, -np.inf), -np.inf)
        choices[exact, folded] = totals.argmax(axis=1)
        values[exact, folded] = totals.max(axis=1)
    if folding is None:
        numbers = (full_layers, 0)
    else:
        price = folding.price
        cheapest_first = sorted(values, key=lambda pair: pair[0] + price * pair[1])
        numbers = max(cheapest_first, key=lambda pair: pair[0] + values[pair][count])
    letters, end = [SHARED] * count, count
    while end:
        column = int(choices[numbers][end])
        end, is_exact = column % count, column >= len(columns) - count
        letters[end] = FULL if is_exact else FOLDED
        numbers = (numbers[0] - is_exact, numbers[1] - (not is_exact))
    pattern = Pattern("".join(letters))
    slopes = folding.slopes if folding is not None and pattern.is_folded else ""
    return pattern.with_suffix(Suffix(slopes=slopes))


def _groups(similarity: Floats, constraints: Constraints) -> tuple[Floats, NDArray[np.bool_]]:
    """Return what a group keeps, by its end and the column of its first layer; and which may be.

    Returns:
        ``[N + 1, columns]``, entry (i, c): what layers up to i - 1 gain from c's list, its own
        layer counted if it is folded, -inf if one of them must be F; ``[columns]``.
    """
    count, folding, start = len(similarity), constraints.folding, constraints.start
    fixed = [layer for layer in constraints.fixed if layer]

    def gained(part: Floats, own: int) -> Floats:
        part = np.tril(part, own - 1)
        part[fixed, :] = -np.inf
        part[np.triu_indices(count, own)] = 0
        return np.vstack([np.zeros(count), part.cumsum(axis=0)])

    is_full = np.array([start.is_full(layer) for layer in range(count)])
    if folding is None:
        return gained(similarity, 0), is_full
    parts = [gained(similarity[:, :count], 1), gained(similarity[:, count:], 0)]
    folds = is_full & [layer in folding.layers for layer in range(count)]
    return np.hstack(parts), np.concatenate([folds, is_full])


def _counts(budget: int, constraints: Constraints) -> Iterator[tuple[int, int]]:
    """Yield numbers of F and L layers within a budget, fewer first; of F layers at least one."""
    most = len(constraints.start)
    for exact in range(1, budget + 1):
        folding = constraints.folding
        affordable = int((budget - exact) / folding.price) if folding is not None else 0
        for folded in range(min(affordable, most - exact) + 1):
            yield exact, folded
