"""What of the CPU indexer the server tests cannot force to happen."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_indexcache.serving.cpu import indexer as indexer_cpu


@pytest.mark.parametrize("rows", [0, 4])
def test_an_idle_rank_touches_nothing(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a rank's idle step is padded depends on its neighbours' timing."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    def no_backend() -> None:
        raise AssertionError("an idle step asked for the backend")

    monkeypatch.setattr(indexer_cpu, "get_attn_backend", no_backend)
    got = indexer_cpu.indexer_forward(
        SimpleNamespace(index_topk=64),
        torch.zeros(rows, 16),
        torch.zeros(rows, 8),
        torch.zeros(rows, dtype=torch.int64),
        SimpleNamespace(forward_mode=ForwardMode.IDLE),
        layer_id=3,
    )
    assert torch.equal(got, torch.full((rows, 64), -1, dtype=torch.int32))


@pytest.mark.parametrize("is_neox", [True, False])
def test_fp8_is_rounded_as_on_a_gpu(
    is_neox: bool, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Scales are powers of two for DeepSeek-V3.2's queries alone, and never for keys."""
    vectors = torch.randn(3, 2, 128, generator=torch.Generator().manual_seed(seed))
    monkeypatch.setattr(indexer_cpu, "_rotate", lambda _indexer, heads, _positions: heads)
    monkeypatch.setattr(indexer_cpu, "hadamard", lambda heads: heads)
    pages = torch.zeros(1, 8448, dtype=torch.uint8)
    cache = object.__new__(indexer_cpu.CpuIndexKeyCache)
    cache.pool = SimpleNamespace(  # type: ignore[assignment]
        index_k_with_scale_buffer_dtype=torch.uint8, start_layer=0, index_head_dim=128
    )
    cache.buffer = [pages]
    indexer: Any = SimpleNamespace(
        wq_b=lambda x: (x.flatten(1), None), n_heads=2, head_dim=128, is_neox_style=is_neox
    )
    backend: Any = SimpleNamespace(index_keys=cache)
    values, scales = indexer_cpu._queries(indexer, vectors, torch.arange(3), backend)
    cache.store(0, torch.tensor([5, 6, 7]), vectors[:, 0])
    for row in range(3):
        largest = float(vectors[row, 0].abs().max())
        exact = largest / 448
        assert float(pages.view(torch.float32)[0, 2048 + 5 + row]) == pytest.approx(exact)
        if is_neox:
            exact = 2.0 ** math.ceil(math.log2(exact))
        assert float(scales[row, 0]) == pytest.approx(exact)
        assert float(values[row, 0].abs().max()) == pytest.approx(largest / exact, rel=2**-4)
