"""Confidence bounds of a stratified mean difference, with contexts as the only observations.

The estimate is the mean over cells (strata) of the mean over a cell's questions, which come in
contexts (clusters). Cells count equally, however many contexts they have, and a context counts by
its number of questions. So a cell's mean is the mean that a harness prints (a ratio estimator,
linearised). Four things decide how it is bounded.

* *Many contexts that differ.* Student's t on the contexts' differences within cells, degrees of
  freedom by Welch and Satterthwaite. Losses are rare and one-sided, so the differences are skewed
  and a plain t claims "no loss" too often; Hall's cubic transformation (1992, Journal of the Royal
  Statistical Society B 54:221) removes the skewness.
* *Few contexts that differ, or none.* Then the standard error itself cannot be trusted (it is zero
  if nothing differs), and for differences within -1 to 1 a bet replaces it (Waudby-Smith and Ramdas
  2024, JRSS B 86:1): a wealth that a fair game multiplies by 1/alpha with a probability of at most
  alpha. This holds at any number of contexts, for any correlation within them, and at any number of
  looks. If none of G contexts differs, it is the exact binomial bound except for the price of
  betting at two stakes: ``(1 - loss)^G`` lies between alpha/2 and alpha. The usual 3/n over
  questions would be wrong here, because the questions of a context fail together; so would
  McNemar's test, which also tests that arms are identical where a margin is asked for.
* *Cells of unequal size.* A small cell counts as much as a large one, may have lost nothing by
  luck, and then adds nothing to the standard error. So differences are counted in steps of the cell
  that moves the mean most, and t is used only if enough of them were seen.
* *Losses that were not seen.* A pattern may lose a few contexts whole and nothing elsewhere. Then a
  run can miss all of them, and the differences that it sees (an engine's flips, fine scores) tell
  nothing about them. So :meth:`Estimate.guarded` is never above the limit of the rule of three:
  with ``n`` contexts, losses with mean ``m``, of at most ``w`` in a context, stay unseen with a
  probability of at most ``(1 - m/w)^n``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_indexcache.lab.stats.pairs import Differences, Flips, Floats

FEW = 24
"""Number of differing contexts below which the bet replaces t. With half as many, "no loss" was
claimed too often for a loss equal to the margin, if flips are rare.
`benchmarks/quality_statistics.py` measures how often it happens with this number. """
STAKES = (0.5, 1.0)
"""Stakes, as shares of the largest one, which only the worst outcome can ruin; half the wealth is
on each. The full stake is best if hardly anything differs. Half of it is best if contexts have one
question, so that a single loss would take all of the full stake. """

LEVELS = 64
"""Number of steps in the largest difference, to which other differences are rounded. Signs of
rounded differences can be exchanged just as well, so the test stays exact, and its sums are few
enough to count."""

_HALVINGS = 36
"""Number of halvings of the interval with a bet's bound, down to 1e-10."""


@dataclass(frozen=True)
class Estimate:
    """Mean difference between two arms, and its bounds.

    A study passes many evaluations of one design at once, as leading dimensions of the values.
    Every result (float64) then has these dimensions, and otherwise none.
    """

    differences: Differences

    @classmethod
    def of(cls, values: Floats) -> Estimate:
        """Make an estimate from ``[..., n]`` independent values, as contexts with one question."""
        count = values.shape[-1]
        cells, questions = np.zeros(count, dtype=np.int64), np.ones(count, dtype=np.int64)
        return cls(Differences(values, cells, (("", 0),), Flips(0, 0, count), questions))

    @cached_property
    def scaled(self) -> Floats:
        """Differences [..., contexts], weighted so that their plain mean is the estimate."""
        return self.differences.values * self._weights

    @cached_property
    def mean(self) -> Any:
        """The estimate."""
        return self.scaled.mean(axis=-1)

    @cached_property
    def level(self) -> float:
        """The reference's own mean, weighted like the estimate; nan if it is not known."""
        if not len(self.differences.reference):
            return float("nan")
        return float((self.differences.reference * self._weights).mean())

    @property
    def heaviest(self) -> float:
        """Largest weight of a context in the mean, where an average context has 1."""
        return float(self._weights.max())

    @cached_property
    def differing(self) -> Any:
        """Effective number of contexts that differ, as if all of them differed by the same amount.

        ``(sum x^2)^2 / sum x^4``: a context that lost all answers outweighs many that lost one, and
        the standard error rests on it alone. The number is at most ``sum x^2`` over the square of
        the largest step by which one lost question moves the mean in any cell: if a small cell lost
        none by luck, the others alone do not show how far the mean may be off. With cells of equal
        size and equal numbers of questions, that limit is never the smaller of the two.
        """
        squares = self.scaled**2
        total = squares.sum(axis=-1)
        # If nothing differs this is 0 / 0, and 0 is returned.
        with np.errstate(divide="ignore", invalid="ignore"):
            alike, steps = total**2 / (squares**2).sum(axis=-1), total / self._step**2
        return np.where(total > 0, np.minimum(alike, steps), 0.0)[()]

    @property
    def exact(self) -> Any:
        """Whether the bounds come from the bet."""
        return self.differing < FEW

    @cached_property
    def error(self) -> Any:
        """Standard error of the mean, clustered by context; infinite if a cell has one context."""
        return self._variances.sum(axis=-1) ** 0.5

    @property
    def spread(self) -> tuple[float, float, float]:
        """Arguments for ``Design.needed``: a context's deviation, share that differ, heaviest."""
        count = len(self.differences)
        return float(self.error) * count**0.5, float(self.differing) / count, self.heaviest

    def lower(self, z: float) -> Any:
        """Return the one-sided lower confidence bound of the mean at the look's boundary ``z``.

        The bet too may spend only the error of this look. At the whole alpha it would be valid by
        itself, but a run whose early looks use the bet and whose later looks use t would spend
        alpha twice.
        """
        return self._bound(1.0, z)

    def upper(self, z: float) -> Any:
        """Return the upper confidence bound of the mean; see :meth:`lower`."""
        return -self._bound(-1.0, z)

    def interval(self, confidence: float = 0.95) -> tuple[Any, Any]:
        """Return the two-sided interval of the mean, always by t corrected for skewness.

        Unlike :meth:`lower` it never bets, so it takes values of any size (losses in nats), but
        does not cover losses that no value shows: see :func:`unseen`. It is infinite if a cell has
        one value.
        """
        from scipy.special import ndtri

        z = float(-ndtri((1 - confidence) / 2))
        # Equal values have no error, for which `_half` has no finite bound.
        alike = self.error == 0
        low, high = (self.mean - np.where(alike, 0.0, self._half(side)) for side in (z, -z))
        return low[()], high[()]

    def guarded(self, z: float) -> Any:
        """Return :meth:`lower`, made low enough for losses of whole contexts that were not seen.

        A claim of no loss beyond a margin rests on this bound, whatever method gives :meth:`lower`.
        """
        rare = unseen(len(self.differences), error_above(z), self.heaviest)
        return np.minimum(self.lower(z), -rare)

    def _bound(self, sign: float, z: float) -> Any:
        """Return the lower bound of ``sign`` times the mean."""
        bounds = np.array(sign * (self.mean - self._half(sign * z)))
        if np.any(self.exact):
            rows = sign * self.scaled[self.exact]
            # In a study some rows use t and others the bet.
            bounds[self.exact] = _bet(rows, self.heaviest, error_above(z))
        return bounds[()]

    @cached_property
    def _weights(self) -> Floats:
        cells, questions = self.differences.cells, self.differences.questions
        per_cell = np.bincount(cells, questions)
        # A cell counts 1 / cells, and a context its share of the cell's questions. The weights are
        # scaled by the number of contexts, so that the plain mean is the estimate.
        weights: Floats = len(cells) * questions / (per_cell.size * per_cell[cells])
        return weights

    @cached_property
    def _counts(self) -> Floats:
        """Number of contexts by cell, [cells]."""
        return np.bincount(self.differences.cells).astype(np.float64)

    def _by_cell(self, values: npt.NDArray[Any]) -> Floats:
        """Sum values [..., contexts] by cell, to [..., cells]."""
        # A product with a 0/1 matrix, because np.bincount takes no leading dimensions.
        sums: Floats = values @ np.eye(self._counts.size)[self.differences.cells]
        return sums

    @property
    def _step(self) -> Any:
        """Largest step by which one lost question moves the mean of the scaled differences.

        For right and wrong answers it is one question of a context. For finer scores it is their
        typical difference in that cell, but no less than the typical difference over all cells.
        """
        values, counts = self.differences.values, self._counts
        differ, squares = self._by_cell(values != 0), self._by_cell(values**2)
        answer = counts / self._by_cell(self.differences.questions)
        with np.errstate(divide="ignore", invalid="ignore"):
            typical = np.sqrt(squares / differ)
            overall = np.sqrt(squares.sum(axis=-1) / differ.sum(axis=-1))[..., None]
        # If nothing differs yet, a step is a whole question.
        finer = np.where(differ > 0, np.maximum(typical, overall), np.inf)
        return (len(self.differences) / (counts.size * counts) * np.minimum(answer, finer)).max(-1)

    @cached_property
    def _residuals(self) -> Floats:
        values, questions = self.differences.values, self.differences.questions
        means = self._by_cell(questions * values) / self._by_cell(questions)
        residuals: Floats = self._weights * (values - means[..., self.differences.cells])
        return residuals

    @cached_property
    def _variances(self) -> Floats:
        """Each cell's contribution to the variance of the mean, [..., cells]."""
        counts, squares = self._counts, self._by_cell(self._residuals**2)
        with np.errstate(divide="ignore", invalid="ignore"):
            # One context shows no variance. It is infinite here, so that nothing is claimed about
            # its cell.
            variances: Floats = counts / (counts - 1) * squares / len(self.differences) ** 2
        return np.where(counts > 1, variances, np.inf)

    @cached_property
    def _freedom(self) -> Any:
        """Degrees of freedom of Student's t, at least 1.

        The formula is Welch's and Satterthwaite's, capped by the number of contexts that differ,
        because the others add nothing to the standard error, and no information on it. Without that
        cap, claims at the margin erred in 5.4 % of 20,000 simulated evaluations instead of 4.9 %,
        where 5 % is promised (a tenth of the questions differing, with correlation 0.3).
        """
        parts = self._variances
        with np.errstate(divide="ignore", invalid="ignore"):
            welch = parts.sum(axis=-1) ** 2 / (parts**2 / (self._counts - 1)).sum(axis=-1)
        # fmax, because Welch's is nan if no cell has a variance.
        return np.fmax(1.0, np.minimum(welch, self.differing - 1))

    def _half(self, z: float) -> Any:
        """Return the distance from the mean to its bound at ``z``, negative for negative ``z``."""
        is_bounded = (self.error > 0) & (self.error < np.inf)
        # Computed from the small tail, because 1 - error would round to 1.
        t = -student_quantile(error_above(abs(z)), self._freedom) * np.sign(z)  # accurate tail
        with np.errstate(divide="ignore", invalid="ignore"):
            skew = (self._residuals**3).sum(axis=-1) / len(self.differences) ** 3 / self.error**3
            # Hall's inverse has t as its limit, but divides by the skewness.
            hall = 3 / skew * (np.cbrt(1 + skew * (t - skew / 6)) - 1)
            half = np.where(np.abs(skew) > 1e-6, hall, t) * self.error
        return np.where(is_bounded, half, np.inf * np.sign(z))


def unseen(contexts: int, alpha: float, heaviest: float = 1.0) -> float:
    """Return the largest mean loss that a run misses entirely with probability ``alpha``.

    Such a loss is concentrated in a few whole contexts; this is the exact form of the rule of
    three. If independent contexts move the mean by at most ``heaviest``, losses with mean ``m`` all
    stay unseen with a probability of at most ``(1 - m / heaviest) ** contexts``, in whatever cells
    they are.
    """
    return heaviest * float(-np.expm1(np.log(alpha) / contexts))


def capital(values: Floats, largest: float, null: Any) -> Any:
    """Return the wealth of a betting martingale, from 1, against H0: the mean is at most ``null``.

    The mean wealth is at most 1 if the mean of the independent ``values`` is at most ``null``: the
    product of their means is largest if they are equal, and then every factor's mean is at most 1.

    Args:
        values: float64 [..., contexts], none below ``-largest``.
        largest: above 0.
        null: [...] or one number, above ``-largest``.
    """
    null = np.asarray(null)[..., None]
    gains = (values - null) / (largest + null)
    with np.errstate(divide="ignore"):
        # The worst value loses the whole stake, and rounding must not make it lose more.
        logs = np.array([np.log1p((stake * gains).clip(-1.0)).sum(axis=-1) for stake in STAKES])
    # exp overflows above 709, and a wealth of e^700 decides just as well.
    return np.exp(np.minimum(logs, 700.0)).mean(axis=0)


def error_above(z: float) -> float:
    """Return the probability of a standard normal value above ``z``."""
    from scipy.special import ndtr

    return float(ndtr(-z))


def _bet(values: Floats, largest: float, alpha: float) -> Floats:
    """Return the bet's lower bound of the mean by row; ``-largest`` if it excludes nothing."""
    low, high = np.full(len(values), -largest), np.full(len(values), largest)
    # Wealth falls as the null rises, so it crosses 1 / alpha only once.
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        won = capital(values, largest, middle) * alpha > 1
        low, high = np.where(won, middle, low), np.where(won, high, middle)
    return low


def student_quantile(probability: float, freedom: Any) -> Any:
    """Return Student's quantile; the 0.975 quantile bounds a two-sided interval of 95 %.

    Args:
        freedom: degrees of freedom, above 0; a number, or an array of them.
    """
    from scipy.special import stdtrit  # scipy.stats takes half a second to import

    return stdtrit(freedom, probability)


def half_width(values: Iterable[float], confidence: float = 0.95) -> float | None:
    """Return half the width of a mean's two-sided interval, for independent, roughly normal values.

    It is None for fewer than two values.
    """
    numbers = np.array([float(value) for value in values])
    count = len(numbers)
    if count < 2:
        return None
    error = numbers.std(ddof=1) / count**0.5
    return float(student_quantile((1 + confidence) / 2, count - 1) * error)


def sign_flip(values: Floats) -> Floats:
    """Return the probability of a sum at most that of ``values``, if all signs were random.

    This is an exact test that a pattern loses: if an arm is as good as its reference, their answers
    to a context could be exchanged, so each difference is as likely as its opposite, whatever its
    size. The test holds at any number of contexts. It does not bound losses that were not seen,
    which only claims of safety need.

    Args:
        values: ``[..., contexts]`` differences with their weights.

    Returns:
        ``[...]`` float64; 1 if nothing differs.
    """
    flat = np.asarray(values, dtype=np.float64).reshape(-1, np.shape(values)[-1])
    probabilities = np.array([_flipped(row) for row in flat])
    return probabilities.reshape(np.shape(values)[:-1])


def _flipped(values: Floats) -> float:
    largest = float(np.abs(values).max(initial=0.0))
    if largest == 0:
        return 1.0
    steps = np.rint(LEVELS * values / largest).astype(np.int64)
    sizes = np.abs(steps[steps != 0])
    # chances[s] is the probability that the differences so far sum to s - sizes.sum().
    total = int(sizes.sum())
    chances = np.zeros(2 * total + 1)
    chances[total] = 1.0
    reach = 0
    for size in sizes:
        low, high = total - reach, total + reach + 1
        half = chances[low:high] / 2
        chances[low:high] = 0.0
        chances[low - size : high - size] += half
        chances[low + size : high + size] += half
        reach += int(size)
    return float(chances[: total + int(steps.sum()) + 1].sum())
