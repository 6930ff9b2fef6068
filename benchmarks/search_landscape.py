"""A made-up loss landscape with the traits that the paper reports, for tests and studies.

Layers form clusters inside of which sharing is nearly free; crossing a cluster boundary costs.
Damage done by one layer travels upwards and makes later damage worse, so flips are not additive.
Batches differ in level (a lot) and in how they weigh the layers (a little).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.evaluators import Floats


class SyntheticEvaluator:
    """Losses by formula; the same arguments always give the same landscape.

    Args:
        num_layers: length of a pattern.
        num_batches: calibration batches.
        seed: of the landscape (layers).
        data_seed: of the batches; another one is another calibration set of the same model.
        noise: how differently batches weigh a layer (standard deviation of the log).
        coupling: how much damage below a layer multiplies the layer's own damage; 0 is additive.
        tokens: per batch, for the cost count.
    """

    kind, in_flight, by_batch = "synthetic", 1, False

    def __init__(
        self,
        num_layers: int,
        num_batches: int = 32,
        seed: int = 0,
        data_seed: int = 0,
        *,
        noise: float = 0.2,
        coupling: float = 4.0,
        tokens: int = 1000,
    ) -> None:
        self.num_layers = num_layers
        self.batch_tokens = (tokens,) * num_batches
        self._arguments = (num_layers, num_batches, seed, data_seed, noise, coupling, tokens)
        self._coupling = coupling
        layers = np.random.default_rng([seed, 1])
        data = np.random.default_rng([data_seed, 2])
        steps = layers.exponential(0.04, num_layers)
        boundaries = layers.random(num_layers) < 0.2
        self._position = np.cumsum(steps + boundaries * layers.uniform(0.3, 1.5, num_layers))
        depth = np.arange(num_layers) / max(num_layers - 1, 1)
        weight = 0.01 * np.exp(0.9 * layers.standard_normal(num_layers)) * (1.6 - depth)
        self._noise = noise
        self._weight = weight[:, None] * self._spread(data)  # [layers, batches]
        self._level = 2.0 + 0.3 * data.standard_normal(num_batches)

    def _spread(self, data: np.random.Generator) -> Floats:
        """Draw ``[layers, batches]``: how batches weigh the layers. Other data overrides it."""
        shape = (self.num_layers, len(self.batch_tokens))
        return np.exp(self._noise * data.standard_normal(shape))

    @property
    def digest(self) -> str:
        """Tells landscapes apart."""
        return hashlib.sha256(repr(self._arguments).encode()).hexdigest()

    def loss(self, pattern: Pattern, batches: Sequence[int]) -> Floats:
        """See :class:`~sglang_indexcache.search.evaluators.Evaluator`."""
        pattern.check_length(self.num_layers)
        places = np.asarray(batches, dtype=np.int64)
        return self._level[places] + self._damage(pattern, places)

    def _damage(self, pattern: Pattern, places: np.ndarray) -> Floats:
        """Return ``[batches]`` nats added by sharing."""
        total = np.zeros(len(places))
        for layer in pattern.shared_layers:
            distance = self._position[layer] - self._position[pattern.sources[layer]]
            alone = self._weight[layer, places] * (1.0 - np.exp(-distance))
            total = total + alone * (1.0 + self._coupling * total)
        return total


class SeenEvaluator(SyntheticEvaluator):
    """A landscape whose layers can be seen, as those of a model in this process."""

    is_blind = False
    """True if the matrix says nothing: random numbers, the same for every batch."""

    def kept_mass(self, batch: int) -> Floats:
        """Say how near layer i is to j, and not how much layer i matters: attention does not.

        Returns:
            ``[N, N]`` float64, see :class:`~sglang_indexcache.search.evaluators.hf`.
        """
        distance = self._position[:, None] - self._position[None, :]
        if self.is_blind:
            mass = np.random.default_rng(0).random(distance.shape)
        else:
            mass = np.exp(-np.maximum(distance, 0.0))
        matrix: Floats = np.tril(mass, -1) + np.eye(self.num_layers)
        return matrix
