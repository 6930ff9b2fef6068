import threading
from collections.abc import Sequence

import numpy as np
import pytest

from sglang_indexcache.errors import SearchError
from sglang_indexcache.lab.search.calibration import Calibration
from sglang_indexcache.lab.search.compare import Comparison, compare
from sglang_indexcache.lab.search.difference import ENOUGH, Difference
from sglang_indexcache.lab.search.evaluators import TokenEvaluator
from sglang_indexcache.lab.search.judged import Faithfulness, Judged, TokenChanges
from sglang_indexcache.lab.stats.bounds import Estimate
from sglang_indexcache.pattern import Pattern

A, B = Pattern("FFFF"), Pattern("FSFS")
Changes = list[TokenChanges]


class Tokens(TokenEvaluator):
    """An evaluator over given losses: pattern B adds ``added`` to the base of every token."""

    kind, in_flight, num_layers = "tokens", 1, 4

    def __init__(
        self,
        added: np.ndarray,
        batches: int = 12,
        counted: np.ndarray | None = None,
        documents: tuple[int, ...] = (),
    ) -> None:
        random = np.random.default_rng(0)
        shape = (batches, len(added))
        self.base = random.uniform(1, 4, shape)
        self.other = self.base + added + random.normal(0, 0.01, shape)
        masks = np.ones(shape, dtype=bool) if counted is None else counted
        kinds = tuple(self.row(mask, n) for n, mask in enumerate(masks))
        sequences = tuple((0,) * (len(kind) + 1) for kind in kinds)
        super().__init__(
            Calibration(
                sequences,
                "test",
                kinds=tuple(kind.astype(np.uint8) for kind in kinds),
                documents=documents,
            )
        )

    def row(self, values: np.ndarray, number: int) -> np.ndarray:
        """Return of a sequence's values those that it has."""
        del number
        return values

    def token_losses(self, pattern: Pattern, batches: Sequence[int]) -> list[np.ndarray]:
        losses = self.base if pattern == A else self.other
        return [self.row(losses[batch], batch) for batch in batches]

    def changes(self, pattern: Pattern, batches: Sequence[int]) -> Changes:
        return [
            TokenChanges(row, row / 10, np.ones(len(row)), np.zeros(len(row)))
            for row in self.token_losses(pattern, batches)
        ]


def against(evaluator: Tokens) -> Comparison:
    """Compare B with A."""
    [comparison] = compare(evaluator, A, [B])
    return comparison


class Uneven(Tokens):
    """The same, of which every fourth sequence has 10 tokens, the next 20, 30 and 40."""

    def row(self, values: np.ndarray, number: int) -> np.ndarray:
        return values[: 10 + 10 * (number % 4)]


def test_the_interval_is_paired_and_without_skewness() -> None:
    evaluator = Tokens(np.full(40, 0.02), ENOUGH)
    comparison = against(evaluator)
    first, second = (x.mean(axis=1) for x in (evaluator.base, evaluator.other))
    low, high = Estimate.of(second - first).interval(0.95)
    assert (comparison.difference.low, comparison.difference.high) == pytest.approx((low, high))
    assert comparison.difference.each == pytest.approx(tuple(second - first))
    assert f"; {ENOUGH} of {ENOUGH} documents lose, number " in comparison.verdict
    numbers = comparison.numbers()
    assert numbers["loss"] - numbers["reference_loss"] == pytest.approx(comparison.difference.mean)
    kl = f"{evaluator.other.mean() / 10:.3f}"
    beside = f"KL to all F text {kl}; likeliest tokens kept text 100.0%; recall +0.0 points"
    assert beside in comparison.verdict
    assert comparison.verdict.startswith("+0.0")
    assert "higher, by less than 1%;" in comparison.verdict


def test_no_difference_is_not_called_one() -> None:
    def verdict(added: np.ndarray, documents: int) -> str:
        evaluator = Tokens(np.zeros(40), documents)
        evaluator.other = evaluator.base + added
        return against(evaluator).verdict

    assert "no difference shown; one above" in verdict(np.tile([0.1, -0.1], 20), ENOUGH)
    wide = verdict(np.tile([1.0, -1.0], 3)[:, None], 6)
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
    assert Difference.of(-abs(added)).documents == "0 of 6 documents lose"


def test_what_no_pattern_can_change_is_left_out() -> None:
    added = np.concatenate([np.zeros(16), np.full(24, 0.05)])
    counted = np.broadcast_to(np.arange(40) >= 16, (12, 40))
    comparison = against(Tokens(added, counted=counted))
    assert comparison.difference.mean == pytest.approx(0.05, abs=0.003)


def test_sequences_count_as_far_as_they_reach() -> None:
    """The oracle is plain loops."""
    evaluator = Uneven(np.linspace(0, 0.4, 40), 24)
    comparison = against(evaluator)
    base, expected_losses = (evaluator.token_losses(p, range(24)) for p in (A, B))
    added = [row - before for before, row in zip(base, expected_losses, strict=True)]
    by_batch = [sum(row) / len(row) for row in added]
    assert comparison.difference.mean == pytest.approx(np.mean(by_batch))


def test_too_little_data() -> None:
    with pytest.raises(SearchError, match="at least two documents"):
        Difference.of(np.array([1.0]))


def test_batches_are_asked_one_by_one() -> None:
    """All in one call would be one long answer, and asked again as a whole when it is lost."""
    calls = []

    class Counted(Tokens):
        def changes(self, pattern: Pattern, batches: Sequence[int]) -> Changes:
            calls.append((pattern, tuple(batches)))
            return super().changes(pattern, batches)

    compare(Counted(np.zeros(40)), A, [B])
    assert calls == [(pattern, (batch,)) for batch in range(12) for pattern in (A, B)]


def test_windows_of_one_text_are_one_document() -> None:
    """28 of 32 "documents" lost once, which were windows of few texts; and so the interval said."""
    documents = tuple(n for n in range(8) for _ in range(8))
    evaluator = Tokens(np.full(40, 0.02), 64, documents=documents)
    difference = against(evaluator).difference
    assert len(difference.each) == 8
    means = (evaluator.other - evaluator.base).mean(axis=1).reshape(8, 8).mean(axis=1)
    assert difference.each == pytest.approx(tuple(means))
    assert (difference.low, difference.high) == pytest.approx(Estimate.of(means).interval(0.95))
    assert "8 of 8 documents lose" in against(evaluator).verdict
    # Two windows of the first text, one of each other: its levels are means over texts as well.
    documents = (0, 0, *range(1, 11))
    uneven = Tokens(np.linspace(0, 0.4, 40), documents=documents)
    numbers = against(uneven).numbers()
    base, other = (
        np.mean([of[:2].mean(), *of[2:].mean(axis=1)]) for of in (uneven.base, uneven.other)
    )
    assert (numbers["reference_loss"], numbers["loss"]) == pytest.approx((base, other))
    assert numbers["kl_to_all_full"]["text"] == pytest.approx(other / 10)
    with pytest.raises(SearchError, match="windows of one text are one"):
        Difference.of(np.array([1.0, 2.0, 3.0]), [4, 4, 4])


def test_several_at_a_time_give_the_same() -> None:
    class Patient(Tokens):
        in_flight = 3
        together = threading.Barrier(3)

        def changes(self, pattern: Pattern, batches: Sequence[int]) -> Changes:
            if threading.current_thread() is not threading.main_thread():
                self.together.wait(30.0)  # until three are here: of 24 calls none waits alone
            return super().changes(pattern, batches)

    added = np.linspace(0, 0.4, 40)
    assert against(Patient(added)) == against(Tokens(added))
    assert Patient.together.n_waiting == 0


def test_few_documents_that_are_all_alike_show_nothing() -> None:
    """Their interval has no width, and was called shown to keep recall."""

    def kept(*recalls: float) -> bool:
        judged = [Judged(1.0, {}, {}, {}, {"passages": recall}) for recall in recalls]
        full = [Judged(1.0, {}, {}, {}, {"passages": 1.0}) for _ in recalls]
        return Faithfulness.of(judged, full, range(len(recalls))).is_shown_to_lose_little

    assert not kept(1.0, 1.0, 1.0)
    assert kept(*[1.0] * 32)
    assert kept(*[1.0, 0.999] * 4)
    assert not kept(*[1.0, 0.9] * 4)
