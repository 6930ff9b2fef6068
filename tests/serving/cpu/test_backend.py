"""Refusals of the CPU's backend; real servers show what it computes (``tests/e2e``)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang_indexcache.errors import StaleIndexError
from sglang_indexcache.serving.cpu.backend import CpuIndexCacheBackend
from sglang_indexcache.serving.index_buffer import IndexBuffer
from sglang_indexcache.serving.process import ServingProcess
from tests.serving.plans import plan


def test_what_sglang_carries_is_what_the_f_layer_selected() -> None:
    """SGLang cuts padding off, and hands on another view of the same memory."""
    backend: Any = CpuIndexCacheBackend.__new__(CpuIndexCacheBackend)
    backend.process = ServingProcess(plan("FSS"))
    backend.index_buffer = IndexBuffer(backend.process)
    backend.index_buffer.begin()
    lists = torch.arange(8, dtype=torch.int32)[:, None]
    backend.index_buffer.select(0, lists)
    assert torch.equal(backend._indices(1, None, lists[:5], 5), lists[:5])
    with pytest.raises(StaleIndexError, match="carried other indices to layer 2"):
        backend._indices(2, None, lists[:5].clone(), 5)
