"""The study of segments: its programme against all patterns, and against the package's."""

from __future__ import annotations

import json
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import search_segments as study
from benchmarks.records import RESULTS
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.methods.pairwise import most_similar
from sglang_indexcache.search.rules import Constraints, Folding


def groups(text: str) -> list[study.Segment]:
    return [(text[g.source], g.source, g.layers.stop) for g in Pattern(text).groups]


@settings(deadline=None, max_examples=50)
@given(count=st.integers(1, 6), seed=st.integers(0, 10**6), twelfths=st.integers(1, 12))
def test_the_programme_finds_the_cheapest_sum_of_segments(
    count: int, seed: int, twelfths: int
) -> None:
    chance, price = np.random.default_rng(seed), Fraction(twelfths, 12)
    costs = {one: chance.uniform(-0.1, 1) for one in study.segments(count, "FL")}
    budget = int(chance.integers(1, count + 1))
    allowed = [
        text
        for text in map("".join, product("FLS", repeat=count))
        if text[0] == "F" and text.count("F") + price * text.count("L") <= budget
    ]
    totals = {text: sum(costs.get(one, 0.0) for one in groups(text)) for text in allowed}
    found = study.cheapest(count, costs, budget, price)
    assert totals[found] == pytest.approx(min(totals.values()), abs=1e-12)


def test_on_predicted_costs_it_is_the_packages() -> None:
    folding = Folding(Fraction(1, 3), frozenset(range(7)))
    for seed in range(20):
        kept = np.random.default_rng(seed).uniform(0, 1, (7, 14))
        costs = {one: study.predicted(kept, one) for one in study.segments(7, "FL")}
        rules = Constraints.make(Pattern.full(7), (), folding)
        for budget in (1, 2, 4):
            found = study.cheapest(7, costs, budget, folding.price)
            assert found == str(most_similar(kept, budget, rules))


def test_a_segment_alone_is_all_that_is_not_f() -> None:
    assert str(study.alone(6, ("F", 1, 4), "0123456789ab")) == "FFSSFF"
    assert str(study.alone(6, ("L", 1, 4), "0123456789ab")) == "FLSSFF@0123456789ab"
    assert len(study.segments(12, "F")) == 66
    assert len(study.segments(12, "L")) == 66


def test_a_split_halves_both_tasks_and_loses_no_document() -> None:
    chosen, others = study.split(10, 6, np.random.default_rng(0))
    assert sorted([*chosen, *others]) == list(range(20))
    assert (chosen < 10).sum() == 3


def test_measured_segments_found_the_best_of_all_in_every_split() -> None:
    record = json.loads((RESULTS / "search" / "segments.json").read_text())
    ways = [mark for marks in record["found"].values() for mark in marks.values()]
    assert all(way["F, S: measured"]["is_optimum"] == record["splits"] for way in ways)
    assert sum(way["F, S: predicted"]["is_optimum"] for way in ways) == 57
    assert len(record["segments"]) == 2 * 66
