"""Do two patterns differ on this data? Paired over batches, and along the context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain, pairwise
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np

from sglang_indexcache.data.marking import Mask
from sglang_indexcache.errors import SearchError
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.evaluators import Floats, TokenEvaluator, counted_mean, in_threads
from sglang_indexcache.stats.bounds import half_width
from sglang_indexcache.study.plots import make_figure, pattern_color, save_figure

CONFIDENCE = 0.95
SMALL = 0.01
"""A share of the reference's loss: words call a difference small, and an interval wide, by it."""
_LABEL_WIDTH = 46
"""Characters of an axis label's line, in the height of a figure."""


@dataclass(frozen=True)
class Difference:
    """A paired difference (other minus reference) with its confidence interval, in nats."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, differences: Floats) -> Difference:
        """From ``[n]`` paired differences; Student's t at :data:`CONFIDENCE`.

        Raises:
            SearchError: fewer than two pairs, which say nothing about spread.
        """
        half = half_width(differences, CONFIDENCE)
        if half is None:
            raise SearchError("a confidence interval needs at least two batches; give more")
        mean = float(differences.mean())
        return cls(mean, mean - half, mean + half)

    @property
    def is_significant(self) -> bool:
        """Whether the interval excludes zero."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class Comparison:
    """One pattern against the reference pattern.

    Attributes:
        reference: what it is compared with.
        pattern: what is compared.
        reference_loss: nats per token.
        loss: nats per token.
        difference: ``loss - reference_loss``, paired over batches.
        edges: ``[buckets + 1]`` positions that bound the buckets of the curve.
        curve: the difference in each bucket of positions, paired over the sequences of which
            something in it counts; None where these are fewer than two.
        trend: the last quarter of the positions minus the first, paired over the sequences of which
            something counts in both: above zero means that sharing hurts more at long range. None
            where these are fewer than two.
    """

    reference: Pattern
    pattern: Pattern
    reference_loss: float
    loss: float
    difference: Difference
    edges: tuple[int, ...]
    curve: tuple[Difference | None, ...]
    trend: Difference | None

    @property
    def verdict(self) -> str:
        """The result in words: the size with its interval, what that tells, and the trend."""
        first = f"{self._size}: {self._meaning}"
        if self.trend is None:
            return f"{first}; what counts lies too close together to show a trend."
        if not self.trend.is_significant:
            return f"{first}; no trend along the context shown."
        word = "more" if self.trend.mean > 0 else "less"
        return f"{first}; sharing costs {word} late in the context ({self.trend.mean:+.5f})."

    @property
    def _size(self) -> str:
        found = self.difference
        relative = 100 * found.mean / self.reference_loss
        interval = f"95 % interval {found.low:+.5f} to {found.high:+.5f}"
        return f"{found.mean:+.5f} nats per token, {relative:+.2f} % ({interval})"

    @property
    def _meaning(self) -> str:
        found, small = self.difference, SMALL * self.reference_loss
        most = max(-found.low, found.high)
        if found.is_significant:
            word = "higher" if found.mean > 0 else "lower"
            return f"{word}, by less than {SMALL:.0%}" if most < small else word
        if most > small:
            return "too few documents to tell whether the loss differs"
        return f"no difference shown, and one above {most / self.reference_loss:.2%} is unlikely"

    def numbers(self) -> dict[str, Any]:
        """Everything as plain data."""
        names = {"pattern": str(self.pattern), "reference": str(self.reference)}
        return {**asdict(self), **names, "verdict": self.verdict}


def compare(
    evaluator: TokenEvaluator,
    reference: Pattern,
    others: Sequence[Pattern],
    counted: Sequence[Sequence[Mask]],
    buckets: int = 8,
) -> list[Comparison]:
    """Measure ``others`` against ``reference`` on every batch of ``evaluator``.

    Args:
        reference: what the others are compared with.
        counted: for each batch the masks of its sequences
            (:attr:`~sglang_indexcache.search.calibration.Calibration.batch_counted`).
        buckets: points of the curve, at most.

    Raises:
        SearchError: fewer than two batches.
    """
    base, *found = _losses(evaluator, [reference, *others])
    return [
        _compare(reference, base, pattern, mine, counted, buckets)
        for pattern, mine in zip(others, found, strict=True)
    ]


def _losses(evaluator: TokenEvaluator, patterns: Sequence[Pattern]) -> list[list[list[Floats]]]:
    """Of every batch under each pattern, as many at a time as the evaluator takes.

    Batches are asked one by one: what fails for a while is not asked again as a whole.
    """
    batches = range(len(evaluator.batch_tokens))
    cells = [(pattern, batch) for pattern in dict.fromkeys(patterns) for batch in batches]
    known: dict[tuple[Pattern, int], list[Floats]] = {}

    def measure(cell: tuple[Pattern, int]) -> None:
        [known[cell]] = evaluator.token_losses(cell[0], [cell[1]])

    in_threads(measure, cells, evaluator.in_flight)
    return [[known[pattern, batch] for batch in batches] for pattern in patterns]


def _compare(
    reference: Pattern,
    base: Sequence[Sequence[Floats]],
    pattern: Pattern,
    mine: Sequence[Sequence[Floats]],
    counted: Sequence[Sequence[Mask]],
    buckets: int,
) -> Comparison:
    before, after = (
        np.array([counted_mean(*pair) for pair in zip(losses, counted, strict=True)])
        for losses in (base, mine)
    )
    added = _added(base, mine, counted)
    places = np.flatnonzero((~np.isnan(added)).any(axis=0))
    first, end = int(places[0]), int(places[-1]) + 1
    edges = np.linspace(first, end, min(buckets, end - first) + 1).astype(int)
    quarter = (end - first) // 4
    ends = _means(added, first, first + quarter), _means(added, end - quarter, end)
    return Comparison(
        reference=reference,
        pattern=pattern,
        reference_loss=float(before.mean()),
        loss=float(after.mean()),
        difference=Difference.of(after - before),
        edges=tuple(map(int, edges)),
        curve=tuple(_difference(_means(added, *bounds)) for bounds in pairwise(edges)),
        trend=_difference(ends[1] - ends[0]),
    )


def _added(
    base: Sequence[Sequence[Floats]],
    mine: Sequence[Sequence[Floats]],
    counted: Sequence[Sequence[Mask]],
) -> Floats:
    """``[sequences, positions]`` float64, what the other pattern adds; NaN where nothing counts."""
    masks = list(chain.from_iterable(counted))
    added = np.full((len(masks), max(map(len, masks))), np.nan)
    losses = zip(chain.from_iterable(base), chain.from_iterable(mine), masks, strict=True)
    for row, (before, after, mask) in zip(added, losses, strict=True):
        row[: len(mask)][mask] = (after - before)[mask]
    return added


def _means(added: Floats, start: int, stop: int) -> Floats:
    """``[sequences]`` means over positions ``start`` to ``stop``; NaN where nothing counts."""
    part = added[:, start:stop]
    known = ~np.isnan(part)
    totals, numbers = np.where(known, part, 0.0).sum(axis=1), known.sum(axis=1)
    means: Floats = np.divide(totals, numbers, out=np.full(len(part), np.nan), where=numbers > 0)
    return means


def _difference(values: Floats) -> Difference | None:
    """Of those sequences that have one."""
    known = values[~np.isnan(values)]
    return Difference.of(known) if len(known) > 1 else None


def draw_comparison(
    comparisons: Sequence[tuple[str, Comparison]], path: Path, objective: str = ""
) -> None:
    """Loss difference along the context, one line a pattern with its 95 % intervals.

    The axis ends a little beyond the lines: an interval may go on beyond it.
    """
    figure, [axis] = make_figure(8.4, 4.2)
    drawn = [d.mean for _, found in comparisons for d in found.curve if d] + [0.0]
    for place, (name, found) in enumerate(comparisons):
        known = [
            (a, b, d) for (a, b), d in zip(pairwise(found.edges), found.curve, strict=True) if d
        ]
        aside = 0.5 + 0.5 * (place - (len(comparisons) - 1) / 2) / len(comparisons)
        axis.errorbar(
            [a + aside * (b - a) for a, b, _ in known], [d.mean for *_, d in known],
            yerr=[d.high - d.mean for *_, d in known], color=pattern_color(found.pattern),
            marker="o", ms=3.5, lw=1.6, elinewidth=0.8, capsize=2,
            label=f"{name}, {len(found.pattern.full_layers)} F",
        )  # fmt: skip
    beyond = 0.12 * (max(drawn) - min(drawn)) or 1.0
    axis.set_ylim(min(drawn) - beyond, max(drawn) + beyond)
    axis.axhline(0, color="black", lw=0.8, ls=":")
    axis.set_xlabel("position in the context, tokens")
    axis.set_ylabel(axis_label("added loss", objective), fontsize=8)
    title = f"against {_short(comparisons[0][1].reference)}; bars: 95 % intervals, cut at the edge"
    axis.set_title(title, fontsize=9, loc="left")
    figure.legend(fontsize=8, frameon=False, loc="outside right center")
    save_figure(figure, path)


def axis_label(quantity: str, objective: str) -> str:
    """An axis label that says which tokens count."""
    which = f" of {objective}" if objective else ""
    return fill(f"{quantity}{which}, nats per token", _LABEL_WIDTH)


def _short(pattern: Pattern) -> str:
    return pattern.summary() if pattern.shared_layers else f"all {len(pattern)} layers F"
