import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_indexcache.errors import SearchError
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.methods.similarity import most_similar
from sglang_indexcache.search.rules import Constraints
from tests.search.helpers import free
from tests.search.oracle import every_pattern, source


def objective(matrix: np.ndarray, text: str) -> float:
    shared = (i for i, c in enumerate(text) if c == "S")
    return sum(matrix[layer, source(text, layer)] for layer in shared)


@settings(deadline=None, max_examples=60)
@given(count=st.integers(1, 9), seed=st.integers(0, 10**6), data=st.data())
def test_is_the_best_of_all_patterns(count: int, seed: int, data: st.DataObject) -> None:
    full = data.draw(st.integers(1, count))
    matrix = np.random.default_rng(seed).uniform(-1, 1, (count, count))
    found = most_similar(matrix, full, free(count))
    assert len(found.full_layers) == full
    best = max(objective(matrix, text) for text in every_pattern(count, full))
    assert objective(matrix, str(found)) == pytest.approx(best, abs=1e-12)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10**6), full=st.integers(3, 6))
def test_is_the_best_of_those_that_the_constraints_allow(seed: int, full: int) -> None:
    matrix = np.random.default_rng(seed).uniform(-1, 1, (9, 9))
    own = Pattern("FFSSFFFFF")
    rules = Constraints.make(own, keep_full=[5])
    allowed = [
        text for text in every_pattern(9, full) if text[5] == "F" and text[2] == text[3] == "S"
    ]
    found = most_similar(matrix, full, rules)
    assert str(found) in allowed
    best = max(objective(matrix, text) for text in allowed)
    assert objective(matrix, str(found)) == pytest.approx(best, abs=1e-12)


def test_impossible_counts_and_shapes() -> None:
    rules = Constraints.make(Pattern.full(5), keep_full=[1, 2])
    with pytest.raises(SearchError, match="no pattern with 2 F layers"):
        most_similar(np.eye(5), 2, rules)
    with pytest.raises(SearchError, match=r"\(4, 4\), the model has 5"):
        most_similar(np.eye(4), 2, rules)
