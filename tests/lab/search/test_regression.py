"""Predictions for patterns, against Gaussian conditioning and likelihoods in plain form."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy.stats import multivariate_normal, spearmanr

from sglang_indexcache.lab.search.methods.regression import (
    ALIKE,
    LENGTHS,
    NOISE,
    OTHER_LIST,
    OWN,
    SUMS,
    Regression,
)
from sglang_indexcache.lab.stats.pairs import Floats
from sglang_indexcache.pattern import Pattern
from tests.fixtures.landscape import SeenEvaluator
from tests.lab.search.oracle import every_pattern

LAYERS = 7

Scales = tuple[float, float, float, float]


def distance(mass: Floats, first: Pattern, second: Pattern) -> float:
    total = 0.0
    for layer in range(len(first)):
        ours, theirs = first.source_of(layer), second.source_of(layer)
        total += abs(mass[layer, ours] - mass[layer, theirs]) + OTHER_LIST * (ours != theirs)
    return total


def covariances(mass: Floats, cells: list[tuple[Pattern, int | None]], scales: Scales) -> Floats:
    """Covariances of losses; a cell without a document is the part that all documents share."""
    length, layer, own, noise = scales
    matrix = np.zeros((len(cells), len(cells)))
    for i, (pattern, document) in enumerate(cells):
        for j, (second, another) in enumerate(cells):
            common = np.exp(-distance(mass, pattern, second) / (length * len(mass)))
            common += layer * sum(
                (1 - mass[each, pattern.source_of(each)]) * (1 - mass[each, second.source_of(each)])
                for each in range(LAYERS)
            )
            together = document is not None and document == another
            matrix[i, j] = common * (1 + own * together) + noise * (i == j and together)
    return matrix


def measured(seed: int) -> tuple[Floats, list[tuple[Pattern, int | None]], Floats, list[Pattern]]:
    """Return how much layers keep, some cells, their losses, and patterns that were not run."""
    draw = np.random.default_rng(seed)
    mass = np.tril(draw.random((LAYERS, LAYERS)), -1) + np.eye(LAYERS)
    patterns = [Pattern(text) for text in every_pattern(LAYERS, 3)]
    chosen = [patterns[n] for n in draw.permutation(len(patterns))]
    cells = [(pattern, int(draw.integers(3))) for pattern in [*chosen[:8], *chosen[:3]]]
    unlike = dict.fromkeys(cells)
    losses = np.array([sum(p.full_layers) / 20 + d / 10 for p, d in unlike])
    return mass, [*unlike], losses + 0.05 * draw.standard_normal(len(losses)), chosen[8:]


@pytest.mark.parametrize("trend", [ALIKE, SUMS])
@pytest.mark.parametrize("seed", range(5))
def test_it_conditions_a_gaussian_with_the_likeliest_scales(
    seed: int, trend: tuple[float, ...]
) -> None:
    mass, cells, losses, unmeasured = measured(seed)
    patterns, documents = zip(*cells, strict=True)
    fitted = Regression(mass, patterns, documents, losses, trend)

    def parameters(scales: Scales) -> tuple[float, float, float]:
        """Return the log-likelihood, and the mean and variance that maximise it."""
        matrix = covariances(mass, cells, scales)
        precision = np.linalg.inv(matrix)
        mean = precision.sum(axis=0) @ losses / precision.sum()
        variance = (losses - mean) @ precision @ (losses - mean) / len(losses)
        normal = multivariate_normal(np.full(len(losses), mean), variance * matrix)
        return float(normal.logpdf(losses)), float(mean), float(variance)

    grid = itertools.product(LENGTHS, trend, OWN, NOISE)
    scales = max(grid, key=lambda each: parameters(each)[0])
    _, mean, variance = parameters(scales)
    joint = variance * covariances(mass, [(each, None) for each in unmeasured] + cells, scales)
    count = len(unmeasured)
    precision = np.linalg.inv(joint)
    conditional = np.linalg.inv(precision[:count, :count])
    means = mean - conditional @ precision[:count, count:] @ (losses - mean)
    predicted, deviations = fitted.predict(unmeasured)
    np.testing.assert_allclose(predicted, means, rtol=1e-6)
    np.testing.assert_allclose(deviations, np.sqrt(conditional.diagonal()), rtol=1e-6)
    np.testing.assert_allclose(fitted.covariance(unmeasured), conditional, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_neighbours_predict_a_pattern_better_than_one_document(seed: int) -> None:
    evaluator = SeenEvaluator(24, 8, seed, noise=1.0)
    draw = np.random.default_rng(seed)
    patterns = [Pattern.from_layers(24, [0, *(1 + draw.permutation(23)[:5])]) for _ in range(160)]
    losses = np.array(
        [
            evaluator.loss(each, range(8)) - evaluator.loss(Pattern.full(24), range(8))
            for each in patterns
        ]
    )
    cells = [(n, d) for n in range(120) for d in draw.permutation(8)[:1].tolist()]
    mass = evaluator.kept_mass(0)[0]
    fitted = Regression(
        mass,
        [patterns[n] for n, _ in cells],
        [d for _, d in cells],
        np.array([losses[n, d] for n, d in cells]),
        ALIKE,
    )
    truth = losses[120:].mean(axis=1)
    by_neighbours = spearmanr(fitted.predict(patterns[120:])[0], truth).statistic
    by_one = np.mean([spearmanr(losses[120:, d], truth).statistic for d in range(8)])
    assert by_neighbours > by_one


@pytest.mark.parametrize("count", [1, 5])
def test_losses_that_are_all_alike_are_expected_everywhere(count: int) -> None:
    mass, cells, _, unmeasured = measured(0)
    patterns, documents = zip(*cells[:count], strict=True)
    means, deviations = Regression(mass, patterns, documents, np.full(count, 0.3), SUMS).predict(
        unmeasured
    )
    np.testing.assert_allclose(means, 0.3)
    assert deviations.max() < 1e-5


def test_a_layer_that_was_never_full_is_expected_to_help_as_it_keeps() -> None:
    """All patterns that were run are bad; that alone does not make others bad."""
    layers, bad = 12, 1.0
    mass = np.tril(np.full((layers, layers), 0.9), -1) + np.eye(layers)
    mass[3:, :3], mass[9:, 3:9] = 0.2, 0.4  # layer 9 begins a group of its own
    np.fill_diagonal(mass, 1)
    run = [
        Pattern.from_layers(layers, [0, 3, *pair])
        for pair in itertools.combinations(range(4, 9), 2)
    ]
    run += [Pattern.from_layers(layers, [0, 4]), Pattern.from_layers(layers, [0])]

    def loss(pattern: Pattern) -> float:
        return bad * sum(1 - mass[layer, pattern.source_of(layer)] for layer in range(layers))

    losses = np.array([loss(each) for each in run])
    never = [Pattern.from_layers(layers, [0, 3, 5, 9])]
    alike, sums = (Regression(mass, run, [0] * len(run), losses, each) for each in (ALIKE, SUMS))
    assert sums.predict(never)[0][0] < sums.predict(run)[0].min()
    assert alike.predict(never)[0][0] > alike.predict(run)[0].min()
