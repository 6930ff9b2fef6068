"""Comparisons with all F: a loss in which kinds of tokens weigh alike, and kept recall."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_indexcache.lab.search.judged import Faithfulness, Judged, TokenChanges
from sglang_indexcache.lab.search.recall import PASSAGES, TEXT


def test_every_kind_of_token_weighs_alike() -> None:
    kinds = np.array([TEXT] * 40 + [PASSAGES] * 10, dtype=np.uint8)
    loss = np.array([2.0] * 40 + [7.0] * 10)
    judged = Judged.of(TokenChanges(loss, *np.zeros((3, 50))), kinds)
    assert judged.mixed_loss == pytest.approx(4.5)
    assert judged.loss == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("lost", "is_kept"),
    [
        ([0.00, 0.00, 0.00, 0.00], True),
        ([0.02, 0.01, 0.01, 0.01], True),  # 0.0125 with a standard error of 0.0025
        ([0.04, 0.00, 0.01, 0.00], False),  # as much with 0.0095
        ([0.02, 0.02, 0.02, 0.02], False),
        ([0.08, -0.06, 0.05, -0.07], False),  # none in the mean, with 0.038
    ],
)
def test_recall_is_kept_if_it_is_by_a_standard_error(lost: list[float], is_kept: bool) -> None:
    full, judged = (
        [Judged(1.0, {}, {}, {}, {"passages": 0.9 - each}) for each in losses]
        for losses in ([0.0] * len(lost), lost)
    )
    assert Faithfulness.of(judged, full, range(len(lost))).loses_little == is_kept
