from collections.abc import Sequence

import numpy as np
import pytest
from scipy import stats

from sglang_indexcache.errors import SearchError
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.compare import Difference, compare

A, B = Pattern("FFFF"), Pattern("FSFS")


class Tokens:
    """An evaluator over given losses: pattern B adds ``added`` to the base of every token."""

    in_flight, num_layers = 1, 4

    def __init__(self, added: np.ndarray, batches: int = 6, per_batch: int = 2) -> None:
        random = np.random.default_rng(0)
        shape = (batches, per_batch, len(added))
        self.base = random.uniform(1, 4, shape)
        self.other = self.base + added + random.normal(0, 0.01, shape)
        self.batch_tokens = (1,) * batches

    def token_losses(self, pattern: Pattern, batches: Sequence[int]) -> list[list[np.ndarray]]:
        chosen = self.base if pattern == A else self.other
        return [list(chosen[batch]) for batch in batches]


def test_the_interval_is_the_paired_t_test() -> None:
    evaluator = Tokens(np.full(40, 0.02))
    [found] = compare(evaluator, A, [B])  # type: ignore[list-item,arg-type]
    first, second = (x.mean(axis=(1, 2)) for x in (evaluator.base, evaluator.other))
    expected = stats.ttest_rel(second, first).confidence_interval(0.95)
    assert (found.difference.low, found.difference.high) == pytest.approx(tuple(expected))
    assert found.loss - found.reference_loss == pytest.approx(found.difference.mean)
    assert "The loss is higher by 0.0" in found.verdict
    assert "no trend" in found.verdict


def test_no_difference_is_not_called_one() -> None:
    evaluator = Tokens(np.zeros(40))
    evaluator.other = evaluator.base + np.tile([[0.1, -0.1]], 20) * np.ones((6, 2, 1))
    [found] = compare(evaluator, A, [B])  # type: ignore[list-item,arg-type]
    assert found.verdict.startswith("No difference shown")


def test_sees_where_in_the_context_it_hurts() -> None:
    [late] = compare(Tokens(np.linspace(0, 0.4, 40)), A, [B], buckets=4)  # type: ignore[arg-type]
    assert late.edges == (0, 10, 20, 30, 40)
    means = [point.mean for point in late.curve]
    assert means == sorted(means)
    assert means == pytest.approx([0.046, 0.149, 0.251, 0.354], abs=0.01)
    assert "sharing costs more late in the context" in late.verdict
    [early] = compare(Tokens(np.linspace(0.4, 0, 40)), A, [B])  # type: ignore[arg-type]
    assert "sharing costs less late in the context" in early.verdict


def test_what_no_pattern_can_change_is_left_out() -> None:
    added = np.concatenate([np.zeros(16), np.full(24, 0.05)])
    [found] = compare(Tokens(added), A, [B], buckets=4, uncounted=16)  # type: ignore[arg-type]
    assert found.difference.mean == pytest.approx(0.05, abs=0.003)
    assert found.edges == (16, 22, 28, 34, 40)


def test_too_little_data() -> None:
    with pytest.raises(SearchError, match="at least two batches"):
        Difference.of(np.array([1.0]))
    with pytest.raises(SearchError, match="too short for a curve"):
        compare(Tokens(np.zeros(3)), A, [B])  # type: ignore[arg-type]
