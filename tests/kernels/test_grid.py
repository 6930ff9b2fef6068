"""Every implementation of every op on the shared grid, and on what hypothesis makes up.

Here that is the reference. On a card ``benchmarks/card/phases.py`` runs it, all sizes.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_indexcache.kernels import dispatch
from sglang_indexcache.kernels.contract import FLOAT32_BITS
from tests.kernels.grid import cases, suite

MACHINE = dispatch.Machine.here()
RUNNING = dispatch.running(MACHINE)
DEVICE = torch.device("cpu")


running = pytest.mark.parametrize("ours", RUNNING, ids=lambda implementation: implementation.name)


@running
@pytest.mark.parametrize("case", cases.TOPK, ids=str)
def test_topk(
    ours: dispatch.Implementation, case: cases.TopKCase, generator: torch.Generator
) -> None:
    logits, visible = cases.topk_inputs(case, generator, DEVICE)
    assert suite.check_topk(ours.load("topk"), logits, visible, case.topk) == []


@running
@pytest.mark.parametrize("case", cases.PREFILL + cases.DECODE, ids=str)
def test_indexer(
    ours: dispatch.Implementation, case: cases.IndexerCase, generator: torch.Generator
) -> None:
    logits, select = ours.load("logits"), ours.load("select")
    batch = cases.indexer_inputs(case, generator, DEVICE)
    assert suite.check_indexer(logits, select, case, batch, FLOAT32_BITS) == []


@running
@pytest.mark.parametrize("case", cases.ATTENTION, ids=str)
def test_sparse_mla(
    ours: dispatch.Implementation, case: cases.AttentionCase, generator: torch.Generator
) -> None:
    inputs = cases.attention_inputs(case, generator, DEVICE)
    assert suite.check_sparse_mla(ours.load("sparse_mla"), inputs) == []


# Few distinct values make ties, also at the threshold and at infinity.
values = st.sampled_from([float("-inf"), -1.0, -0.0, 0.0, 1e-45, 1.0, 2.5, 1e30, float("inf")])


@st.composite
def matrices(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, int]:
    width = draw(st.integers(1, 24))
    rows = draw(st.lists(st.lists(values, min_size=width, max_size=width), min_size=1, max_size=2))
    visible = draw(st.lists(st.integers(0, width), min_size=len(rows), max_size=len(rows)))
    return (
        torch.tensor(rows),
        torch.tensor(visible, dtype=torch.int32),
        draw(st.integers(1, 26)),
    )


@running
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(problem=matrices())
def test_topk_of_anything(
    ours: dispatch.Implementation, problem: tuple[torch.Tensor, torch.Tensor, int]
) -> None:
    logits, visible, k = problem
    topk = ours.load("topk")
    assert suite.check_topk(topk, logits.to(DEVICE), visible.to(DEVICE), k) == []


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


@running
@settings(max_examples=6, deadline=None)
@given(case=batches(), seed=st.integers(0, 2**31))
def test_select_of_anything(
    ours: dispatch.Implementation, case: cases.IndexerCase, seed: int
) -> None:
    logits, select = ours.load("logits"), ours.load("select")
    batch = cases.indexer_inputs(case, torch.Generator().manual_seed(seed), DEVICE)
    assert suite.check_indexer(logits, select, case, batch, FLOAT32_BITS) == []
