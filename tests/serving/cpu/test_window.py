"""Recent windows in the CPU backend: over the border of a chunk, and in front of padding."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from sglang_indexcache.serving.cpu.observers import CpuWindows
from sglang_indexcache.serving.cpu.select import HostBatch


def widened(
    batch: HostBatch, lists: list[list[int]], windows: torch.Tensor | int
) -> list[set[int]]:
    backend: Any = SimpleNamespace(batch=batch)
    wide = CpuWindows(backend).widen(torch.tensor(lists, dtype=torch.int32), windows, 3)
    return [{token for token in row if token >= 0} for row in wide.tolist()]


def test_a_window_reaches_into_the_chunk_before() -> None:
    """Rows 4 and 5 of a request whose first four tokens were an earlier chunk, and one decode."""
    slots = torch.arange(20).view(2, 10)
    batch = HostBatch((2, 1), (6, 9), slots)
    assert widened(batch, [[0], [1], [2]], 3) == [{0, 2, 3, 4}, {1, 3, 4, 5}, {2, 6, 7, 8}]
    each = torch.tensor([0, 3, 1], dtype=torch.int32)
    assert widened(batch, [[0], [1], [2]], each) == [{0}, {1, 3, 4, 5}, {2, 8}]


def test_rows_that_pad_the_batch_see_nothing() -> None:
    batch = HostBatch((1,), (5,), torch.arange(5).view(1, 5))
    assert widened(batch, [[0], [-1], [-1]], 2) == [{0, 3, 4}, set(), set()]


def test_fewer_lists_than_rows() -> None:
    batch = HostBatch((3,), (3,), torch.arange(3).view(1, 3))
    assert widened(batch, [[0], [0]], 1) == [{0}, {0, 1}]
