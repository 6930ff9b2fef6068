"""An exact test that a pattern loses: were it harmless, every difference might have either sign.

Where an arm is as good as its reference, their answers to a context could be exchanged, so each
difference is as likely as its opposite, whatever its size. How low the sum is among all ways to
choose the signs is then a p-value that holds at any number of contexts, without a bound for
losses that were not seen: that is for claims of safety, and a loss needs none.
"""

from __future__ import annotations

import numpy as np

from sglang_indexcache.lab.stats.pairs import Floats

LEVELS = 64
"""Steps of the largest difference to which others are rounded. The signs of rounded differences
can be exchanged just as well, so the test stays exact, and its sums are few enough to count."""


def sign_flip(values: Floats) -> Floats:
    """Return the probability of a sum as low as that of ``values``, were all signs as likely.

    Args:
        values: ``[..., contexts]`` differences, weighted as they count.

    Returns:
        ``[...]`` float64; 1 where nothing differs.
    """
    flat = np.asarray(values, dtype=np.float64).reshape(-1, np.shape(values)[-1])
    probabilities = np.array([_of_one(row) for row in flat])
    return probabilities.reshape(np.shape(values)[:-1])


def _of_one(values: Floats) -> float:
    largest = float(np.abs(values).max(initial=0.0))
    if largest == 0:
        return 1.0
    steps = np.rint(LEVELS * values / largest).astype(np.int64)
    sizes = np.abs(steps[steps != 0])
    # chances[s] is that of a sum of s - sizes.sum() among the first differences.
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
