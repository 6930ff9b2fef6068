"""Regression over patterns: it predicts the loss of any pattern from the losses of others.

It is a Gaussian process. Patterns under which layers keep alike shares of what they need are
expected to lose alike. With a trend, each layer also adds loss in proportion to what it does not
keep; without one, a pattern unlike all that were run is expected to lose as much as their mean. The
loss on a document is the sum of a part that all documents share and the document's own part, so
forwards of different documents add up to one estimate.
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
ALIKE, SUMS = (0.0,), (0.03, 0.1, 0.3, 1.0, 3.0)
"""Trends: variances of what a layer that keeps nothing adds, where that of alike patterns is 1."""
OWN = (0.1, 0.3, 1.0)
"""Variances of a document's own part, as shares of the common part's."""
NOISE = (0.002, 0.01, 0.05)
"""Variances of what is left."""


class Regression:
    """A Gaussian process, fitted to losses of patterns on documents.

    Its four scales are those of the grid under which the losses are likeliest (Rasmussen and
    Williams, *Gaussian Processes for Machine Learning*, equation 5.8).

    Args:
        kept: ``[N, N]``; entry (i, j) says how much layer i keeps with layer j's list.
        patterns: pattern of each loss, ``n`` of them.
        documents: number of each loss's document.
        losses: ``[n]``, in any unit.
        trend: :data:`ALIKE` or :data:`SUMS`.
    """

    def __init__(
        self,
        kept: Floats,
        patterns: Sequence[Pattern],
        documents: Sequence[int],
        losses: Floats,
        trend: Sequence[float],
    ) -> None:
        self._kept = kept
        self._patterns = list(dict.fromkeys(patterns))
        numbers = {pattern: number for number, pattern in enumerate(self._patterns)}
        of_loss = np.array([numbers[pattern] for pattern in patterns])
        distances = _distances(kept, self._patterns, self._patterns)
        lost = _lost(kept, self._patterns)
        products = lost @ lost.T
        same_document = np.equal.outer(documents, documents)
        likeliest = -np.inf
        for length, layer, own, noise in product(LENGTHS, trend, OWN, NOISE):
            common = np.exp(-distances / (length * len(kept))) + layer * products
            covariance = common[of_loss[:, None], of_loss] * (1 + own * same_document)
            covariance += noise * np.eye(len(losses))
            likelihood, mean, variance = _likelihood(covariance, losses)
            if likelihood > likeliest:
                likeliest, chosen = likelihood, covariance
                self._length, self._layer = length * len(kept), layer
                self._mean, self._variance = mean, variance
        # The covariance with a loss depends on its pattern alone, so sums by pattern are enough.
        by_pattern = np.equal.outer(range(len(self._patterns)), of_loss).astype(float)
        inverse = np.linalg.inv(chosen)
        self._weights = by_pattern @ inverse @ (losses - self._mean)
        self._inverse = by_pattern @ inverse @ by_pattern.T

    def predict(self, patterns: Sequence[Pattern]) -> tuple[Floats, Floats]:
        """Predict the parts of losses that all documents share: means and standard deviations."""
        beside, alone = self._common(patterns, self._patterns), _lost(self._kept, patterns)
        known = ((beside @ self._inverse) * beside).sum(axis=1)
        unknown = 1 + self._layer * (alone**2).sum(axis=1) - known
        deviations = np.sqrt(self._variance * np.maximum(unknown, 0))
        return self._mean + beside @ self._weights, deviations

    def covariance(self, patterns: Sequence[Pattern]) -> Floats:
        """Return ``[n, n]``, the covariance of what :meth:`predict` says of patterns."""
        beside = self._common(patterns, self._patterns)
        among = self._common(patterns, patterns)
        covariance: Floats = self._variance * (among - beside @ self._inverse @ beside.T)
        return covariance

    def _common(self, first: Sequence[Pattern], second: Sequence[Pattern]) -> Floats:
        """Return ``[first, second]``, the covariance of the parts that all documents share."""
        products = _lost(self._kept, first) @ _lost(self._kept, second).T
        fallen = np.exp(-_distances(self._kept, first, second) / self._length)
        common: Floats = fallen + self._layer * products
        return common


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


def _lost(kept: Floats, patterns: Sequence[Pattern]) -> Floats:
    """Return ``[n, N]``: what each layer does not keep of what it needs."""
    sources = np.array([pattern.sources for pattern in patterns])
    lost: Floats = 1 - kept[np.arange(len(kept)), sources]
    return lost
