import threading
from collections.abc import Sequence

import numpy as np
import pytest

from sglang_indexcache.errors import SearchError
from sglang_indexcache.lab.search.compare import Comparison, compare
from sglang_indexcache.lab.search.difference import ENOUGH, Difference
from sglang_indexcache.lab.stats.bounds import Estimate
from sglang_indexcache.pattern import Pattern

A, B = Pattern("FFFF"), Pattern("FSFS")
Losses = list[list[np.ndarray]]


class Tokens:
    """An evaluator over given losses: pattern B adds ``added`` to the base of every token."""

    in_flight, num_layers = 1, 4

    def __init__(self, added: np.ndarray, batches: int = 6, per_batch: int = 2) -> None:
        random = np.random.default_rng(0)
        shape = (batches, per_batch, len(added))
        self.base = random.uniform(1, 4, shape)
        self.other = self.base + added + random.normal(0, 0.01, shape)
        self.batch_tokens = (1,) * batches

    def token_losses(self, pattern: Pattern, batches: Sequence[int]) -> Losses:
        losses = self.base if pattern == A else self.other
        return [list(losses[batch]) for batch in batches]


def against(evaluator: Tokens, start: int = 0) -> Comparison:
    """Compare B with A, on every prediction from ``start`` on."""
    losses = evaluator.token_losses(A, range(len(evaluator.batch_tokens)))
    masks = [[np.arange(len(row)) >= start for row in batch] for batch in losses]
    [comparison] = compare(evaluator, A, [B], masks)  # type: ignore[arg-type]
    return comparison


class Uneven(Tokens):
    """The same, of which sequence s has 10 + 10 s tokens."""

    def token_losses(self, pattern: Pattern, batches: Sequence[int]) -> Losses:
        losses = super().token_losses(pattern, batches)
        return [[row[: 10 + 10 * s] for s, row in enumerate(batch)] for batch in losses]


def test_the_interval_is_paired_and_without_skewness() -> None:
    evaluator = Tokens(np.full(40, 0.02), ENOUGH)
    comparison = against(evaluator)
    first, second = (x.mean(axis=(1, 2)) for x in (evaluator.base, evaluator.other))
    low, high = Estimate.of(second - first).interval(0.95)
    assert (comparison.difference.low, comparison.difference.high) == pytest.approx((low, high))
    assert comparison.difference.each == pytest.approx(tuple(second - first))
    assert f"; {ENOUGH} of {ENOUGH} documents lose, number " in comparison.verdict
    assert comparison.loss - comparison.reference_loss == pytest.approx(comparison.difference.mean)
    assert comparison.verdict.startswith("+0.0")
    assert "higher, by less than 1%;" in comparison.verdict
    assert "no trend" in comparison.verdict


def test_no_difference_is_not_called_one() -> None:
    def verdict(added: np.ndarray, documents: int) -> str:
        evaluator = Tokens(np.zeros(40), documents)
        evaluator.other = evaluator.base + added
        return against(evaluator).verdict

    assert "no difference shown; one above" in verdict(np.tile([0.1, -0.1], 20), ENOUGH)
    wide = verdict(np.tile([1.0, -1.0], 3)[:, None, None], 6)
    assert "too few documents to tell whether the loss differs" in wide


def test_few_documents_exclude_nothing() -> None:
    """A third may lose and none be among eight; yet "unlikely" was said of such a loss."""
    evaluator = Tokens(np.zeros(40), batches=8)
    evaluator.other = evaluator.base + np.tile([[0.1, -0.1]], 20)
    verdict = against(evaluator).verdict
    assert "unlikely" not in verdict
    assert "no difference shown, and fewer than 32 documents cannot exclude one" in verdict
    assert "with 8 documents, a loss that sits in up to 31 % of documents can go unseen" in verdict
    evaluator.other = evaluator.base + 0.001
    assert "less than" not in against(evaluator).verdict


def test_says_how_many_documents_lose_and_which_most() -> None:
    added = np.array([0.1, -0.1, 0.2, 0.7, 0.0, -0.3])
    difference = Difference.of(added)
    assert (difference.lost, difference.documents) == (
        3,
        "3 of 6 documents lose, number 4 most: +0.70000",
    )


def test_sees_where_in_the_context_it_hurts() -> None:
    late = against(Tokens(np.linspace(0, 0.4, 40)))
    assert late.trend is not None
    assert late.trend.mean == pytest.approx(0.354 - 0.046, abs=0.01)
    assert "sharing costs more late in the context" in late.verdict
    early = against(Tokens(np.linspace(0.4, 0, 40)))
    assert "sharing costs less late in the context" in early.verdict


def test_what_no_pattern_can_change_is_left_out() -> None:
    added = np.concatenate([np.zeros(16), np.full(24, 0.05)])
    comparison = against(Tokens(added), start=16)
    assert comparison.difference.mean == pytest.approx(0.05, abs=0.003)
    assert comparison.trend is not None
    assert comparison.trend.mean == pytest.approx(0.0, abs=0.01)  # 0.05 if the first 16 counted


def test_sequences_count_as_far_as_they_reach() -> None:
    """The oracle is plain loops; the last quarter's mean is over those that reach it."""
    evaluator = Uneven(np.linspace(0, 0.4, 40), per_batch=4)
    comparison = against(evaluator)
    base, expected_losses = (evaluator.token_losses(p, range(6)) for p in (A, B))
    by_batch = [
        float(np.mean([x for row in o for x in row]) - np.mean([x for row in b for x in row]))
        for b, o in zip(base, expected_losses, strict=True)
    ]
    assert comparison.difference.mean == pytest.approx(np.mean(by_batch))
    added = [
        row - before
        for b, o in zip(base, expected_losses, strict=True)
        for before, row in zip(b, o, strict=True)
    ]
    longest = [row for row in added if len(row) == 40]
    assert len(longest) == 6
    assert comparison.trend is not None
    expected = np.mean([row[30:].mean() - row[:10].mean() for row in longest])
    assert comparison.trend.mean == pytest.approx(expected)


def test_answers_at_the_end_alone_show_no_trend() -> None:
    evaluator = Tokens(np.full(40, 0.02), batches=2)
    ends = np.zeros((2, 2, 40), dtype=bool)
    ends[0, 0, 3] = ends[0, 1, 38] = ends[1, 0, 38] = ends[1, 1, 39] = True
    [comparison] = compare(evaluator, A, [B], list(map(list, ends)))  # type: ignore[arg-type]
    assert comparison.trend is None
    assert "lies too close together to show a trend" in comparison.verdict
    assert comparison.numbers()["trend"] is None


def test_too_little_data() -> None:
    with pytest.raises(SearchError, match="at least two batches"):
        Difference.of(np.array([1.0]))
    assert against(Tokens(np.zeros(3))).trend is None


def test_batches_are_asked_one_by_one() -> None:
    """All in one call would be one long answer, and asked again as a whole when it is lost."""
    calls = []

    class Counted(Tokens):
        def token_losses(self, pattern: Pattern, batches: Sequence[int]) -> Losses:
            calls.append((pattern, tuple(batches)))
            return super().token_losses(pattern, batches)

    evaluator = Counted(np.zeros(40))
    masks = [[np.ones(40, dtype=bool)] * 2] * 6
    compare(evaluator, A, [B], masks)  # type: ignore[arg-type]
    assert calls == [(pattern, (batch,)) for batch in range(6) for pattern in (A, B)]


def test_several_at_a_time_give_the_same() -> None:
    class Patient(Tokens):
        in_flight = 3
        together = threading.Barrier(3)

        def token_losses(self, pattern: Pattern, batches: Sequence[int]) -> Losses:
            if threading.current_thread() is not threading.main_thread():
                self.together.wait(30.0)  # until three are here: of 12 calls none waits alone
            return super().token_losses(pattern, batches)

    added = np.linspace(0, 0.4, 40)
    assert against(Patient(added)) == against(Tokens(added))
    assert Patient.together.n_waiting == 0
