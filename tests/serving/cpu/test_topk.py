"""Exact top-k on a CPU: the fast path against the reference (``tests/kernels/test_topk.py``)."""

import pytest
import torch
from hypothesis import given, settings

from sglang_indexcache.kernels.indexer.reference import topk as reference
from sglang_indexcache.serving.cpu.select import topk_overwriting
from tests.kernels.test_topk import problems


@settings(max_examples=300)
@given(problems())
def test_fast_path_equals_reference(problem: tuple[torch.Tensor, torch.Tensor, int]) -> None:
    logits, visible, topk = problem
    assert torch.equal(
        topk_overwriting(logits.clone(), visible, topk), reference(logits, visible, topk)
    )


@pytest.mark.parametrize("width", [1, 63, 64, 65, 700, 4099])
@pytest.mark.parametrize("topk", [1, 64, 512])
def test_random_rows(generator: torch.Generator, width: int, topk: int) -> None:
    logits = torch.randn(9, width, generator=generator)
    logits[3] = 0.0  # all equal
    logits[4] = logits[4].relu()  # many zeros
    logits[5] = -logits[5].relu() + 0.0 * logits[5].sign()  # at the top, of both signs
    visible = torch.randint(0, width + 1, (9,), generator=generator)
    expected = reference(logits, visible, topk)
    picks = topk_overwriting(logits.clone(), visible, topk)
    assert torch.equal(picks, expected)
    assert torch.equal(topk_overwriting(logits.clone(), visible, topk), picks)


def test_no_rows() -> None:
    empty = torch.empty(0, 5)
    assert topk_overwriting(empty, torch.empty(0, dtype=torch.int64), 3).shape == (0, 3)
    assert reference(empty, torch.empty(0, dtype=torch.int64), 3).shape == (0, 3)
