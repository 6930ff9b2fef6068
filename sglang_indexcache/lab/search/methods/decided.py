"""Search in which one pass proposes patterns, a regression chooses what to run, and loss decides.

A matrix of layer pairs says which layers may share. It differs a little between documents, and
ignores the effect of errors on later layers, and that another layer's list may copy better than a
layer's own. So the optima of documents, in every rating, are proposals, of which some are run. From
all that was run a regression predicts the loss of patterns in which layers are exchanged, and those
that may be the best are run next, a few at a time, each time on another document. After half of
these rounds, layers that are not F in the best pattern are each tried there once: what promises
most is near what was run, so a layer that was F in bad patterns alone would never get its turn.
Later rounds weigh what the tries showed against other documents, and the last is tries again, for
the best may be another by then.

The mixed loss decides: as much in running text as in passages that come again, and as in keys and
rules. Divergence from all F does not decide, because lists that copy better than a layer's own also
diverge; running text alone would choose patterns that can no longer copy
(benchmarks/results/smollm2/real-model.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from sglang_indexcache.lab.search.ledger import Ledger, Step
from sglang_indexcache.lab.search.methods.pairwise import (
    Pairwise,
    averaged,
    most_similar,
    pair_matrices,
)
from sglang_indexcache.lab.search.methods.proposal import Added, Proposal, Sureness
from sglang_indexcache.lab.search.methods.regression import ALIKE, SUMS, Regression
from sglang_indexcache.lab.search.rules import Constraints, Mark, Targets
from sglang_indexcache.pattern import Pattern

TOGETHER = 6
"""Number of patterns that are run in a round, on one document."""
LEADERS, DEPTH = 3, 3
"""Number of patterns whose exchanges are predicted, and how often, each time of the best."""
CONSIDERED = 64
"""Number of predicted patterns among which a round chooses."""
CERTAIN = 0.01
"""Loss in nats below which no pattern is better: ratios of losses of nearly certain answers would
outweigh all other documents, and 0 has none."""
TRIED = 12
"""Most layers that are tried in the best pattern after half of the rounds."""
KNOCKOUT = ((4, 2), (2, 6))
"""Numbers of patterns, and of documents on which they are run, before the best is run on all."""


@dataclass(frozen=True)
class Decided:
    """Method that runs proposals by pairs, exchanges layers, and decides by the mixed loss."""

    pairs: Pairwise

    objective, judges = "mean over kinds of the loss", True

    @property
    def in_words(self) -> str:
        """See :class:`~sglang_indexcache.lab.search.methods.Method`."""
        return (
            "loss, in text and recall alike, among exchanges of layers that a regression chooses, "
            f"in proposals by {self.pairs.in_words}"
        )

    def descend(self, ledger: Ledger, targets: Targets) -> Iterator[Step | Proposal]:
        """See :class:`~sglang_indexcache.lab.search.methods.Method`."""
        exploration = Exploration(ledger, targets.constraints, self.pairs)
        times = {mark: rounds(targets.constraints, mark) for mark in reversed(targets.marks)}
        for mark in times:
            exploration.propose(mark.full_layers)
        for turn in range(max(times.values())):
            for mark in (mark for mark, of_mark in times.items() if turn < of_mark):
                half, last = times[mark] // 2, times[mark] - 1
                if turn == half:
                    exploration.try_layers(mark.full_layers, TRIED)
                if turn == last > half:
                    exploration.try_layers(mark.full_layers, TOGETHER)
                else:
                    # Few losses say little of single layers: sums over layers mislead early rounds.
                    exploration.explore(mark.full_layers, SUMS if turn >= half else ALIKE)
        for mark in times:
            yield exploration.decide(mark)

    def between(self, ledger: Ledger, targets: Targets, mark: Mark) -> Proposal:
        """See :class:`~sglang_indexcache.lab.search.methods.Method`."""
        exploration = Exploration(ledger, targets.constraints, self.pairs)
        exploration.explore(mark.full_layers)
        return exploration.decide(mark)

    def least(self, targets: Targets, batch_tokens: Sequence[int]) -> int:
        """See :class:`~sglang_indexcache.lab.search.methods.Method`."""
        first = self.pairs.least(targets, batch_tokens) + sum(batch_tokens)
        times = sum(1 + rounds(targets.constraints, mark) for mark in targets.marks)
        on_one = times * TOGETHER + len(targets.marks) * (1 + TRIED + 1)  # beside the best, twice
        on_one += len(targets.marks) * sum(number * on for number, on in KNOCKOUT)
        finals = len(targets.marks) * sum(batch_tokens)
        return first + on_one * max(batch_tokens) + finals


def rounds(constraints: Constraints, mark: Mark) -> int:
    """Return how often exchanges are run for a mark: more, the more of them may matter.

    With few F layers there are few to exchange, and with many each matters less.
    """
    leave = mark.full_layers - constraints.fewest
    come = len(constraints.start.full_layers) - mark.full_layers
    return max(1, min(2 * leave, come // 2))


class Exploration:
    """The patterns of one search, of which some are run and the others predicted.

    What is run for one number of F layers is learnt for all.

    Raises:
        SearchError: see :func:`.pairwise.pair_matrices`.
    """

    def __init__(self, ledger: Ledger, constraints: Constraints, pairs: Pairwise) -> None:
        self.ledger, self.constraints = ledger, constraints
        self.matrices = pair_matrices(ledger, pairs)
        self.together = averaged(ledger, self.matrices)
        ledger.judged(constraints.start)

    def propose(self, count: int) -> None:
        """Run proposals with ``count`` F layers on one document, the likeliest first."""
        of_all = [most_similar(matrix, count, self.constraints) for matrix in self.together]
        votes = self._votes(count)
        proposed = dict.fromkeys([*of_all, *(pattern for pattern, _ in votes.most_common())])
        self.ledger.judged_each([*proposed][:TOGETHER], [self._documents()[0]])

    def explore(self, count: int, trend: Sequence[float] = SUMS) -> None:
        """Run patterns with ``count`` F layers that may be the best, on one more document."""
        document, fitted = self._documents()[0], self._fitted(trend)
        leaders = self._leaders(fitted, count)
        pool = dict.fromkeys(leaders)
        for _ in range(DEPTH):
            reached = dict.fromkeys(other for each in leaders for other in self._exchanges(each))
            leaders = _best(fitted, [*(pool | reached)], LEADERS, hope=1)
            pool |= dict.fromkeys(_best(fitted, [*reached], CONSIDERED, hope=1))
        asked = self.ledger.asked
        new = [pattern for pattern in pool if (pattern, document) not in asked]
        chosen = _spread(fitted, _best(fitted, new, CONSIDERED, hope=1))
        self.ledger.judged_each(chosen, [document])

    def try_layers(self, count: int, most: int) -> None:
        """Run the best pattern with ``count`` F layers beside exchanges that bring other layers.

        Of these the ``most`` that promise most; those run before, or surely worse, are left out.
        """
        document, fitted, run = self._documents()[0], self._fitted(), self._run(count)
        [leader] = _best(fitted, run, 1)
        new: list[Pattern] = []
        for come in self.constraints.restorable(leader):
            for best in _best(fitted, self._exchanges(leader, come=[come]), 1, hope=1):
                more, deviation = _difference(fitted, leader, best)
                if best not in run and more < 2 * deviation:
                    new.append(best)
        tried = _best(fitted, new, most, hope=1)
        self.ledger.judged_each([leader, *tried] if tried else [], [document])

    def decide(self, mark: Mark) -> Proposal:
        """Run the best on more and more documents, and say how sure each layer of the winner is."""
        documents = self._documents()
        for number, on in (*KNOCKOUT, (1, len(documents))):
            [best, *others] = _best(self._fitted(), self._run(mark.full_layers), number)
            self.ledger.judged_each([best, *others], documents[:on])
        fitted, votes = self._fitted(), self._votes(mark.full_layers)
        layers = {
            layer: Sureness(
                sum(n for pattern, n in votes.items() if pattern.is_full(layer)) / votes.total(),
                self._without(layer, best, fitted),
            )
            for layer in self.constraints.candidates(best)
        }
        return Proposal(mark, best, layers)

    def _votes(self, count: int) -> Counter[Pattern]:
        """Return how many documents each pattern is optimal for, in any rating."""
        return Counter(
            most_similar(matrix, count, self.constraints)
            for of_one in self.matrices
            for matrix in of_one
        )

    def _run(self, count: int) -> list[Pattern]:
        """Return the patterns with ``count`` F layers that were run."""
        run = dict.fromkeys(pattern for pattern, _ in self.ledger.asked)
        return [pattern for pattern in run if len(pattern.full_layers) == count]

    def _leaders(self, fitted: Regression, count: int) -> list[Pattern]:
        """Return the best with ``count`` F layers, and the best of others with some flipped."""
        sizes = sorted({len(pattern.full_layers) for pattern, _ in self.ledger.asked})
        leaders = _best(fitted, self._run(count), LEADERS)
        for size in sizes:
            if size not in (count, len(self.constraints.start.full_layers)):
                [pattern] = _best(fitted, self._run(size), 1)
                leaders.append(self._flipped(fitted, pattern, count))
        return [*dict.fromkeys(leaders)]

    def _flipped(self, fitted: Regression, pattern: Pattern, count: int) -> Pattern:
        """Flip layers, each time the best, until ``count`` are F."""
        rules = self.constraints
        while len(pattern.full_layers) != count:
            fewer = len(pattern.full_layers) > count
            layers = rules.candidates(pattern) if fewer else rules.restorable(pattern)
            [pattern] = _best(fitted, [rules.flipped(pattern, layer) for layer in layers], 1)
        return pattern

    def _documents(self) -> list[int]:
        """Return the documents, those first on which the fewest patterns were run."""
        times = Counter(batch for _, batch in self.ledger.asked)
        return sorted(self.ledger.all_batches, key=lambda batch: times[batch])

    def _fitted(self, trend: Sequence[float] = SUMS) -> Regression:
        """Fit the regression to everything that this search ran, as ratios to all F's losses."""
        asked, start = self.ledger.asked, self.constraints.start
        losses = {cell: max(judged.mixed_loss, CERTAIN) for cell, judged in asked.items()}
        run = [cell for cell in asked if cell[0] != start] or [*asked]
        ratios = np.log([losses[cell] / losses[start, cell[1]] for cell in run])
        patterns, batches = zip(*run, strict=True)
        return Regression(self.together[0], patterns, batches, ratios, trend)

    def _exchanges(
        self, pattern: Pattern, leave: Iterable[int] = (), come: Iterable[int] = ()
    ) -> list[Pattern]:
        """Return the patterns in which one F layer became another, each of those given or any."""
        rules = self.constraints
        return [
            rules.keeping({*pattern.full_layers, coming} - {leaving})
            for leaving in leave or rules.candidates(pattern)
            for coming in come or rules.restorable(pattern)
        ]

    def _without(self, layer: int, best: Pattern, fitted: Regression) -> Added | None:
        """Predict what the best exchange of an F layer would add to the loss of a pattern."""
        others = self._exchanges(best, [layer])
        if not others:
            return None
        more, deviation = _difference(fitted, best, *_best(fitted, others, 1))
        full = [each.mixed_loss for each in self.ledger.judged(self.constraints.start)]
        loss = np.mean(full) * np.exp(fitted.predict([best])[0])
        return Added(*(loss * np.expm1(more + deviation * np.array([0, -1.96, 1.96]))).tolist())


def _difference(fitted: Regression, first: Pattern, second: Pattern) -> tuple[float, float]:
    """Predict what the second pattern loses more than the first: mean and standard deviation."""
    less, more = fitted.predict([first, second])[0]
    covariance = fitted.covariance([first, second])
    return more - less, np.sqrt(max(covariance.trace() - 2 * covariance[0, 1], 0))


def _best(
    fitted: Regression, patterns: Sequence[Pattern], number: int, hope: float = 0
) -> list[Pattern]:
    """Return the patterns of least predicted loss, less ``hope`` standard deviations."""
    if not patterns:
        return []
    means, deviations = fitted.predict(patterns)
    order = np.argsort(means - hope * deviations, kind="stable")
    return [patterns[n] for n in order[:number]]


def _spread(fitted: Regression, patterns: Sequence[Pattern]) -> list[Pattern]:
    """Choose the patterns to run, each as if those chosen before it had been run already.

    What is learnt from one is taken off its neighbours' uncertainty, and so off the hope for them
    (GP-BUCB: Desautels, Krause and Burdick 2014).
    """
    if not patterns:
        return []
    means, covariance = fitted.predict(patterns)[0], fitted.covariance(patterns)
    chosen: list[int] = []
    for _ in range(min(TOGETHER, len(patterns))):
        bounds = means - np.sqrt(np.maximum(covariance.diagonal(), 0))
        bounds[chosen] = np.inf
        chosen.append(int(bounds.argmin()))
        column = covariance[:, chosen[-1]]
        covariance = covariance - np.outer(column, column) / max(column[chosen[-1]], 1e-12)
    return [patterns[n] for n in chosen]
