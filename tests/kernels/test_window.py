"""The window's kernel against the reference, which tests/test_recent.py holds against sets."""

from __future__ import annotations

import os

import pytest
import torch

from sglang_indexcache.kernels import window
from sglang_indexcache.recent import Addresses, widen

pytestmark = [
    pytest.mark.gpu,  # so that only test_triton_interpreted.py runs it where there is none
    pytest.mark.csrc,
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1",
        reason="needs TRITON_INTERPRET=1: on a GPU tests/gpu holds this kernel",
    ),
]

TOPK, LENGTH = 300, 700


def rows(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Lists of some of what each row sees, which is from nothing to more than k; and how much."""
    draw = torch.Generator().manual_seed(seed)
    visible = torch.randint(0, LENGTH, (count,), generator=draw)
    visible[:4] = torch.tensor([0, 1, TOPK, TOPK + 1])
    lists = torch.full((count, TOPK), -1, dtype=torch.int32)
    for one, sees in zip(lists, visible.tolist(), strict=True):
        chosen = torch.randperm(sees, generator=draw)[:TOPK]
        one[: len(chosen)] = chosen
    return lists, visible


def addresses(form: str, count: int) -> Addresses:
    draw = torch.Generator().manual_seed(7)
    owners = torch.randint(0, 3, (count,), generator=draw)
    if form == "slots":
        slots = torch.randperm(3 * LENGTH, generator=draw).view(3, LENGTH).int()
        return Addresses(table=slots, owners=owners)
    return Addresses(offsets=owners * LENGTH) if form == "offsets" else Addresses()


@pytest.mark.parametrize("form", ["positions", "slots", "offsets"])
@pytest.mark.parametrize(("width", "multiple"), [(1, 1), (8, 128), (100, 64)])
def test_agrees_with_the_reference(form: str, width: int, multiple: int) -> None:
    lists, visible = rows(24, seed=width)
    at = addresses(form, 24)
    lists = at.of(lists).int()
    each = torch.randint(0, width + 1, (24,), generator=torch.Generator().manual_seed(width)).int()
    for windows in (width, each):
        wide, counts = window.widen(lists, visible, windows, width, at, multiple)
        expected, expected_counts = widen(lists, visible, windows, width, at, multiple)
        assert torch.equal(wide, expected)
        assert torch.equal(counts, expected_counts)


def test_no_row_and_rows_with_holes() -> None:
    none = torch.empty(0, 4, dtype=torch.int32)
    empty, counts = window.widen(none, torch.empty(0), 2, 2, Addresses())
    assert empty.shape == (0, 6)
    assert counts.shape == (0,)
    lists = torch.tensor([[3, -1, 0, -1]], dtype=torch.int32)
    wide, counts = window.widen(lists, torch.tensor([5]), 3, 3, Addresses())
    assert wide.tolist() == [[3, 0, 4, 2, -1, -1, -1]]
    assert counts.tolist() == [4]
