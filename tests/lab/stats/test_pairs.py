from __future__ import annotations

import random
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_indexcache.errors import QualityError
from sglang_indexcache.lab.stats.pairs import Answer, paired
from tests.lab.evaluate.evaluations import answer


def table(arms: dict[str, list[list[float]]], length: int = 4096) -> list[Answer]:
    """Make the answers to one task; a list is a context."""
    return [
        answer((f"c{number}", f"q{place}", "needles", length), arm, value)
        for arm, contexts in arms.items()
        for number, values in enumerate(contexts)
        for place, value in enumerate(values)
    ]


@given(st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_pairs_are_those_of_a_loop(seed: int) -> None:
    draw = random.Random(seed)
    rows = table(
        {arm: [[draw.randrange(2) for _ in range(4)] for _ in range(5)] for arm in ("full", "p")}
    )
    asked_rows = [row for row in rows if draw.random() < 0.8]
    keys = [
        {(r.context, r.question): r.right for r in asked_rows if r.arm == a} for a in ("full", "p")
    ]
    expected = defaultdict(list)
    for key in keys[0].keys() & keys[1].keys():
        expected[key[0]].append(keys[1][key] - keys[0][key])
    differences = paired(asked_rows, "p", "full")
    means = sorted(float(np.mean(values)) for values in expected.values())
    assert sorted(differences.values) == pytest.approx(means)
    all_values = [value for values in expected.values() for value in values]
    assert differences.flips.pairs == len(all_values)
    assert differences.flips.lost == sum(value < 0 for value in all_values)
    assert differences.flips.won == sum(value > 0 for value in all_values)


def test_repeats_are_the_engines_own_noise() -> None:
    rows = table({"full": [[1, 1, 0]]})
    again = [answer(("c0", "q1", "needles", 4096), "full", 0, repeat=1)]
    noise = paired(rows + again, "full", "full", repeat=1)
    assert (noise.flips.lost, noise.flips.won, noise.flips.pairs) == (1, 0, 1)


def test_only_the_named_cells_count() -> None:
    rows = table({"full": [[1]], "p": [[0]]}) + [
        answer(("other", "q", "lookup", 4096), arm, 1) for arm in ("full", "p")
    ]
    assert paired(rows, "p", "full").names == (("lookup", 4096), ("needles", 4096))
    assert paired(rows, "p", "full", cells=[("lookup", 4096)]).flips.lost == 0


def test_arms_without_a_common_question_are_refused() -> None:
    with pytest.raises(QualityError, match="in common"):
        paired(table({"full": [[1]], "p": [[0]]}), "absent", "full")
