"""Regression over patterns: it predicts the loss of any pattern from the losses of others.

It is a Gaussian process. Patterns under which layers keep alike shares of what they need are
expected to lose alike. The loss on a document is the sum of a part that all documents share and
the document's own deviation, so forwards of different documents add up to one estimate.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np

from sglang_indexcache.lab.stats.pairs import Floats
from sglang_indexcache.pattern import Pattern

OTHER_LIST = 0.05
"""Distance between two lists of one layer that keep as much of what it needs."""
LENGTHS = (0.25, 0.5, 1.0)
"""Distances, for each layer of the model, at which the correlation of losses has fallen to 1/e."""
OWN = (0.1, 0.3, 1.0)
"""Variances of a document's own deviation, if the shared part's is 1."""
NOISE = (0.002, 0.01, 0.05)
"""Variances of what is left, likewise."""


class Regression:
    """A Gaussian process, fitted to losses of patterns on documents.

    Its three scales are those of the grid under which the losses are likeliest (Rasmussen and
    Williams, *Gaussian Processes for Machine Learning*, equation 5.8).

    Args:
        kept: ``[N, N]``; entry (i, j) says how much layer i keeps with layer j's list.
        patterns: pattern of each loss, ``n`` of them.
        documents: number of each loss's document.
        losses: ``[n]``, in any unit.
    """

    def __init__(
        self, kept: Floats, patterns: Sequence[Pattern], documents: Sequence[int], losses: Floats
    ) -> None:
        self._kept = kept
        self._patterns = list(dict.fromkeys(patterns))
        numbers = {pattern: number for number, pattern in enumerate(self._patterns)}
        of_loss = np.array([numbers[pattern] for pattern in patterns])
        distances = self._distances(self._patterns)[of_loss[:, None], of_loss]
        same_document = np.equal.outer(documents, documents)
        likeliest = -np.inf
        for length, own, noise in product(LENGTHS, OWN, NOISE):
            fallen = np.exp(-distances / (length * len(kept)))
            covariance = fallen * (1 + own * same_document) + noise * np.eye(len(losses))
            likelihood, mean, variance = _likelihood(covariance, losses)
            if likelihood > likeliest:
                likeliest, chosen = likelihood, covariance
                self._length, self._mean, self._variance = length * len(kept), mean, variance
        # The covariance with a loss depends on its pattern alone, so sums by pattern are enough.
        by_pattern = np.equal.outer(range(len(self._patterns)), of_loss).astype(float)
        inverse = np.linalg.inv(chosen)
        self._weights = by_pattern @ inverse @ (losses - self._mean)
        self._inverse = by_pattern @ inverse @ by_pattern.T

    def predict(self, patterns: Sequence[Pattern]) -> tuple[Floats, Floats]:
        """Predict the parts of losses that all documents share: means and standard deviations."""
        beside = np.exp(-self._distances(patterns) / self._length)
        known = ((beside @ self._inverse) * beside).sum(axis=1)
        deviations = np.sqrt(self._variance * np.maximum(1 - known, 0))
        return self._mean + beside @ self._weights, deviations

    def covariance(self, patterns: Sequence[Pattern]) -> Floats:
        """Return ``[n, n]``, the covariance of what :meth:`predict` says of patterns."""
        beside = np.exp(-self._distances(patterns) / self._length)
        among = np.exp(-_distances(self._kept, patterns, patterns) / self._length)
        covariance: Floats = self._variance * (among - beside @ self._inverse @ beside.T)
        return covariance

    def _distances(self, patterns: Sequence[Pattern]) -> Floats:
        return _distances(self._kept, patterns, self._patterns)


def _likelihood(covariance: Floats, losses: Floats) -> tuple[float, float, float]:
    """Return the log-likelihood but for a constant, and the mean and variance that maximise it."""
    from scipy.linalg import cho_factor, cho_solve

    factor = cho_factor(covariance, lower=True)
    ones = np.ones(len(losses))
    weighted, weights = cho_solve(factor, np.stack([losses, ones], axis=1)).T
    mean = weighted.sum() / weights.sum()
    variance = max((losses - mean) @ (weighted - mean * weights) / len(losses), 1e-12)
    spread = np.log(factor[0].diagonal()).sum()
    return float(-len(losses) / 2 * np.log(variance) - spread), float(mean), float(variance)


def _distances(kept: Floats, first: Sequence[Pattern], second: Sequence[Pattern]) -> Floats:
    """Return ``[first, second]``: by how much more or less layers keep, summed over layers."""
    lists = [np.array([pattern.sources for pattern in side]).T for side in (first, second)]
    total = np.zeros((len(first), len(second)))
    for of_layer, ours, theirs in zip(kept, *lists, strict=True):
        total += np.abs(of_layer[ours][:, None] - of_layer[theirs])
        total += OTHER_LIST * (ours[:, None] != theirs)
    return total
