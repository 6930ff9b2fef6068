"""Comparison of two patterns, paired over batches; and of the late context with the early one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from sglang_indexcache.lab.search.calibration import Calibration
from sglang_indexcache.lab.search.difference import ENOUGH, Difference, unseen_in_words
from sglang_indexcache.lab.search.evaluators import Floats, TokenEvaluator, in_threads
from sglang_indexcache.lab.search.judged import Faithfulness, Judged, TokenChanges
from sglang_indexcache.lab.search.recall import Kinds
from sglang_indexcache.pattern import Pattern

SMALL = 0.01
"""A share of the reference's loss: words call a difference small, and an interval wide, by it."""


@dataclass(frozen=True)
class Comparison:
    """One pattern against the reference pattern; losses in nats per token.

    Attributes:
        faithfulness: recall and loss against the reference; divergence and likeliest tokens against
            all F, whatever the reference is.
        trend: what ``pattern`` adds in the last quarter of the positions minus what it adds in the
            first, paired over the documents in which both have tokens that count. Above zero,
            sharing hurts more at long range. None where there are fewer than two such documents.
    """

    reference: Pattern
    pattern: Pattern
    faithfulness: Faithfulness
    trend: Difference | None

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
        """The result in words: the size, what it tells, which documents lose, and the trend."""
        difference, measured = self.difference, self.faithfulness
        unseen = unseen_in_words(len(difference.each))
        clauses = (
            self._meaning,
            difference.documents,
            self._trend,
            unseen,
            *measured.beside_loss(),
        )
        return f"{self._size}: {'; '.join(clauses)}."

    @property
    def _trend(self) -> str:
        if self.trend is None:
            return "what counts lies too close together to show a trend"
        if not self.trend.is_significant:
            return "no trend along the context shown"
        word = "more" if self.trend.mean > 0 else "less"
        return f"sharing costs {word} late in the context ({self.trend.mean:+.5f})"

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
            "trend": asdict(self.trend) if self.trend else None,
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
        SearchError: fewer than two documents.
    """
    base, *measured = _changes(evaluator, [reference, *patterns])
    return [
        _compare(evaluator.calibration, reference, base, pattern, changes)
        for pattern, changes in zip(patterns, measured, strict=True)
    ]


Changes = list[TokenChanges]
"""Changes by a pattern, for each sequence."""


def _changes(evaluator: TokenEvaluator, patterns: Sequence[Pattern]) -> list[Changes]:
    """Measure every batch under each pattern, as many at a time as the evaluator takes.

    Batches are asked one by one: what fails for a while is not asked again as a whole.
    """
    batches = range(len(evaluator.batch_tokens))
    cells = [(pattern, batch) for batch in batches for pattern in dict.fromkeys(patterns)]
    changes: dict[tuple[Pattern, int], TokenChanges] = {}

    def measure(cell: tuple[Pattern, int]) -> None:
        [changes[cell]] = evaluator.changes(cell[0], [cell[1]])

    in_threads(measure, cells, evaluator.in_flight)
    return [[changes[pattern, batch] for batch in batches] for pattern in patterns]


def _compare(
    data: Calibration, reference: Pattern, base: Changes, pattern: Pattern, after: Changes
) -> Comparison:
    full, judged = (
        [Judged.of(*pair) for pair in zip(changes, data.kinds, strict=True)]
        for changes in (base, after)
    )
    added = _added(base, after, kinds=data.kinds)
    faithfulness = Faithfulness.of(judged, full, data.documents)
    return Comparison(reference, pattern, faithfulness, _trend(added, data.documents))


def _added(*rows: Sequence[TokenChanges], kinds: Sequence[Kinds]) -> Floats:
    """Return ``[sequences, positions]`` float64 losses that the second adds; NaN if uncounted."""
    added = np.full((len(kinds), max(map(len, kinds))), np.nan)
    for row, before, after, kind in zip(added, *rows, kinds, strict=True):
        row[: len(kind)][kind > 0] = (after.loss - before.loss)[kind > 0]
    return added


def _trend(added: Floats, documents: Sequence[int]) -> Difference | None:
    """Compare the last quarter of the positions that count with the first."""
    places = np.flatnonzero((~np.isnan(added)).any(axis=0))
    first, end = int(places[0]), int(places[-1]) + 1
    quarter = (end - first) // 4
    change = _means(added[:, end - quarter : end]) - _means(added[:, first : first + quarter])
    is_measured = ~np.isnan(change)
    of_them = np.array(documents)[is_measured]
    several = len(set(of_them.tolist())) > 1
    return Difference.of(change[is_measured], of_them.tolist()) if several else None


def _means(part: Floats) -> Floats:
    """Return ``[sequences]`` means of ``[sequences, positions]``; NaN where nothing counts."""
    is_counted = ~np.isnan(part)
    totals, numbers = np.where(is_counted, part, 0.0).sum(axis=1), is_counted.sum(axis=1)
    means: Floats = np.divide(totals, numbers, out=np.full(len(part), np.nan), where=numbers > 0)
    return means
