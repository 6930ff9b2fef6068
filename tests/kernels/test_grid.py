"""Selections of every implementation on what hypothesis makes up; here that is the reference.

Its command runs the grid itself (``test_dispatch.py``; on a card ``benchmarks/card/phases.py``).
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_indexcache.kernels import dispatch
from sglang_indexcache.kernels.indexer.reference import FLOAT32_BITS
from tests.kernels.grid import cases, suite

RUNNING = dispatch.running(dispatch.Machine.here())


@st.composite
def batches(draw: st.DrawFn) -> cases.IndexerCase:
    pairs = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 140)), max_size=3))
    return cases.IndexerCase(
        "drawn",
        heads=draw(st.sampled_from([8, 16, 32, 64])),
        lens=tuple((queries, queries + before) for queries, before in pairs),
        topk=draw(st.integers(1, 70)),
        fill=draw(st.sampled_from(["random", "integers", "zeros", "huge"])),
        padding=draw(st.integers(0, 2)),
    )


@pytest.mark.parametrize("ours", RUNNING, ids=lambda implementation: implementation.name)
@settings(max_examples=6, deadline=None)
@given(case=batches(), seed=st.integers(0, 2**31))
def test_select_of_anything(
    ours: dispatch.Implementation, case: cases.IndexerCase, seed: int
) -> None:
    logits, select = ours.load("logits"), ours.load("select")
    batch = cases.indexer_inputs(case, torch.Generator().manual_seed(seed), torch.device("cpu"))
    assert suite.check_indexer(logits, select, case, batch, FLOAT32_BITS) == []
