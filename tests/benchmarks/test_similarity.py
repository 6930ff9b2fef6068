"""The appendix's search: the best pattern of a matrix, and what the matrix holds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.paper.similarity import Similarity, most_similar
from sglang_indexcache.errors import SearchError
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.calibration import Calibration
from sglang_indexcache.search.rules import Constraints
from tests.cli.test_search import TINY
from tests.search.helpers import free
from tests.search.oracle import every_pattern, source


def objective(matrix: np.ndarray, text: str) -> float:
    shared = (i for i, c in enumerate(text) if c == "S")
    return float(sum(matrix[layer, source(text, layer)] for layer in shared))


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


LENGTHS = (120, 70, 97)


def matrix(*sequences: tuple[int, ...]) -> np.ndarray:
    data = Calibration(sequences, 1, "test")
    return Similarity(TINY, data).matrix(range(len(sequences)))


def test_the_matrix_is_the_mean_over_all_queries() -> None:
    cut = [tuple(np.random.default_rng(n).integers(10, 500, n).tolist()) for n in LENGTHS]
    whole, alone = matrix(*cut), [matrix(ids) for ids in cut]
    weights = np.array(LENGTHS) / sum(LENGTHS)
    assert whole == pytest.approx(np.tensordot(weights, alone, 1), abs=1e-6)
    assert np.array_equal(np.diag(whole), np.ones(12))
    below = whole[np.tril_indices(12, -1)]
    assert ((below > 0) & (below < 1)).all()
    assert not whole[np.triu_indices(12, 1)].any()


def test_similarity_is_one_where_everything_is_selected() -> None:
    """64 tokens, index_topk 64: every layer selects all of them."""
    assert matrix(tuple(range(10, 74)))[np.tril_indices(12)] == pytest.approx(1.0, abs=1e-6)
