import numpy as np
import pytest

from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.stability import agreement


def answers(*texts: str) -> list[dict[str, Pattern]]:
    return [{"1/2": Pattern(text)} for text in texts]


def test_the_same_and_the_opposite_order() -> None:
    same = agreement([[3, 1, 2], [3, 1, 2]], answers("FFSS", "FFSS"))
    assert (same.kendall_tau, same.common_full_layers["1/2"]) == (1.0, 1.0)
    opposite = agreement([[3, 1, 2], [2, 1, 3]], answers("FFSS", "FSFS"))
    assert opposite.kendall_tau == -1.0
    assert opposite.common_full_layers["1/2"] == 0.5


def test_orders_are_compared_on_what_both_flipped() -> None:
    """Pairs (1,2), (1,5), (2,5): two agree, one does not, so tau = (2 - 1) / 3."""
    found = agreement([[1, 2, 5, 7], [9, 1, 5, 2]], answers("FS", "FS"))
    assert found.kendall_tau == pytest.approx(1 / 3)


def test_all_pairs_count() -> None:
    found = agreement([[1, 2], [1, 2], [2, 1]], answers("FF", "FF", "FF"))
    assert found.kendall_tau == pytest.approx((1 - 1 - 1) / 3)
    assert found.kendall_tau_lowest == -1


def test_chance_is_what_random_patterns_agree_on() -> None:
    random = np.random.default_rng(0)

    def draw() -> set[int]:
        return {0, *(random.permutation(11)[:3] + 1)}

    observed = np.mean([len(draw() & draw()) / 4 for _ in range(20000)])
    texts = answers("FFFFSSSSSSSS", "FSSSFFFSSSSS")
    found = agreement([[1], [1]], texts)
    assert found.expected_by_chance["1/2"] == pytest.approx(observed, abs=0.01)
    assert np.isnan(found.kendall_tau)
