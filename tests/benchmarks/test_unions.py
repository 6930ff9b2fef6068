"""Unions of neighbouring lists."""

import numpy as np

from benchmarks.kernels import unions


def test_the_union_of_lists_is_that_of_sets() -> None:
    draw = np.random.default_rng(3)
    lists = np.stack([draw.permutation(40)[:8] for _ in range(30)])
    for rows in (1, 3, 8):
        sizes = unions.union_sizes(lists, rows, 40)
        starts = range(8, 30 - rows + 1, rows)
        want = [len({int(x) for row in lists[at : at + rows] for x in row}) / 8 for at in starts]
        np.testing.assert_allclose(sizes, want)
