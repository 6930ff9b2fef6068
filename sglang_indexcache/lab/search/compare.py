"""Comparison of two patterns, paired over documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sglang_indexcache.lab.search.difference import ENOUGH, Difference, unseen_in_words
from sglang_indexcache.lab.search.evaluators import TokenEvaluator
from sglang_indexcache.lab.search.judged import Faithfulness
from sglang_indexcache.lab.search.ledger import Ledger
from sglang_indexcache.pattern import Pattern

SMALL = 0.01
"""Share of the reference's loss below which text calls a difference small, and above which an
interval is wide."""


@dataclass(frozen=True)
class Comparison:
    """Comparison of one pattern with the reference pattern; losses are in nats per token.

    Attributes:
        faithfulness: recall and loss relative to the reference; divergence and likeliest tokens
            relative to all F, whatever the reference is.
    """

    reference: Pattern
    pattern: Pattern
    faithfulness: Faithfulness

    @property
    def difference(self) -> Difference:
        """Loss that the pattern adds."""
        return self.faithfulness.loss

    @property
    def reference_loss(self) -> float:
        """The reference's own loss."""
        return self.faithfulness.full_loss

    @property
    def verdict(self) -> str:
        """Text on the result: its size, its meaning, and the documents that lose."""
        difference, measured = self.difference, self.faithfulness
        unseen = unseen_in_words(len(difference.each))
        clauses = (self._meaning, difference.documents, unseen, *measured.beside_loss())
        return f"{self._size}: {'; '.join(clauses)}."

    @property
    def _size(self) -> str:
        difference = self.difference
        relative = 100 * difference.mean / self.reference_loss
        interval = f"95 % interval {difference.low:+.5f} to {difference.high:+.5f}"
        return f"{difference.mean:+.5f} nats per token, {relative:+.2f} % ({interval})"

    @property
    def _meaning(self) -> str:
        difference, small = self.difference, SMALL * self.reference_loss
        largest, is_enough = max(-difference.low, difference.high), len(difference.each) >= ENOUGH
        if difference.is_significant:
            word = "higher" if difference.mean > 0 else "lower"
            return f"{word}, by less than {SMALL:.0%}" if is_enough and largest < small else word
        if largest > small:
            return "too few documents to tell whether the loss differs"
        if not is_enough:
            return f"no difference shown, and fewer than {ENOUGH} documents cannot exclude one"
        share = f"{largest / self.reference_loss:.2%}"
        return f"no difference shown; one above {share} is unlikely unless few documents hold it"

    def numbers(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return {
            "pattern": str(self.pattern),
            "reference": str(self.reference),
            "reference_loss": self.reference_loss,
            "loss": self.reference_loss + self.difference.mean,
            "difference": asdict(self.difference),
            "recall": asdict(self.faithfulness.recall),
            "kl_to_all_full": dict(self.faithfulness.kl),
            "likeliest_kept": dict(self.faithfulness.kept),
            "verdict": self.verdict,
        }


def compare(
    evaluator: TokenEvaluator, reference: Pattern, patterns: Sequence[Pattern]
) -> list[Comparison]:
    """Measure ``patterns`` against ``reference`` on every batch of ``evaluator``.

    Raises:
        SearchError: there are fewer than two documents.
    """
    ledger, documents = Ledger(evaluator), evaluator.calibration.documents
    base, *judged = ledger.judged_each([reference, *patterns])
    return [
        Comparison(reference, pattern, Faithfulness.of(of_pattern, base, documents))
        for pattern, of_pattern in zip(patterns, judged, strict=True)
    ]
