"""The recent window's lists, against sets."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_indexcache.recent import last_tokens, union


@st.composite
def rows(draw: st.DrawFn) -> tuple[list[int], int, int]:
    """``(list, visible, window)`` of one row: some of what it sees, padded to 6."""
    visible = draw(st.integers(0, 12))
    tokens = draw(st.permutations(range(visible)))
    chosen = tokens[: draw(st.integers(0, min(6, visible)))]
    return chosen + [-1] * (6 - len(chosen)), visible, draw(st.integers(0, 8))


@given(st.lists(rows(), min_size=1, max_size=4))
def test_a_row_gets_its_list_and_of_its_last_tokens_those_that_it_lacks(
    found: list[tuple[list[int], int, int]],
) -> None:
    """Each once, together at the row's start."""
    lists, visible, windows = (torch.tensor(column) for column in zip(*found, strict=True))
    wide = union(lists, last_tokens(visible, windows, 8))
    assert wide.shape == (len(found), 14)
    for got, (chosen, sees, window) in zip(wide.tolist(), found, strict=True):
        listed = [token for token in chosen if token >= 0]
        near = {token for token in range(sees) if token >= sees - window}
        tokens = [token for token in got if token >= 0]
        assert tokens[: len(listed)] == listed
        assert len(tokens) == len(set(tokens))
        assert set(tokens) == {*listed, *near}
        assert set(got[len(tokens) :]) <= {-1}


def test_one_window_for_all_rows() -> None:
    assert last_tokens(torch.tensor([5, 2, 0]), 3, 3).tolist() == [[4, 3, 2], [1, 0, -1], [-1] * 3]


def test_more_than_one_dimension_of_rows() -> None:
    lists = torch.tensor([[[0, 4]], [[3, 2]]])
    wide = union(lists, last_tokens(torch.tensor([[5], [4]]), 2, 2))
    assert wide.tolist() == [[[0, 4, 3, -1]], [[3, 2, -1, -1]]]
