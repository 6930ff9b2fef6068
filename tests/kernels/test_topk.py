"""Exact top-k: the reference against torch.topk."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_indexcache.kernels.indexer.reference import topk as reference

# Few distinct values make ties, also at the threshold and with -inf.
values = st.sampled_from([float("-inf"), -1.0, 0.0, 0.0, 1.0, 2.5, 1e30])


@st.composite
def problems(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, int]:
    width = draw(st.integers(1, 24))
    rows = draw(st.lists(st.lists(values, min_size=width, max_size=width), min_size=1, max_size=5))
    visible = draw(st.lists(st.integers(0, width), min_size=len(rows), max_size=len(rows)))
    return torch.tensor(rows), torch.tensor(visible), draw(st.integers(1, 26))


@given(problems())
def test_reference_selects_torchs_values(
    problem: tuple[torch.Tensor, torch.Tensor, int],
) -> None:
    logits, visible, topk = problem
    for row, limit, selection in zip(
        logits, visible, reference(logits, visible, topk), strict=True
    ):
        valid = selection[selection >= 0].long()
        count = min(topk, int(limit))
        assert len(valid) == count
        assert torch.equal(valid, valid.unique(sorted=True))
        expected = row[:limit].topk(count).values
        assert torch.equal(row[valid].sort(descending=True).values, expected)
        if count:  # of equal values at the threshold the first positions are taken
            ties = (row[:limit] == expected[-1]).nonzero().squeeze(-1)
            selected_ties = valid[row[valid] == expected[-1]]
            assert torch.equal(selected_ties, ties[: len(selected_ties)])
