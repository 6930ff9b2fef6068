"""Cases of the CPU indexer that the server tests cannot force to happen."""

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
    selected = indexer_cpu.indexer_forward(
        SimpleNamespace(index_topk=64),
        torch.zeros(rows, 16),
        torch.zeros(rows, 8),
        torch.zeros(rows, dtype=torch.int64),
        SimpleNamespace(forward_mode=ForwardMode.IDLE),
        layer_id=3,
    )
    assert torch.equal(selected, torch.full((rows, 64), -1, dtype=torch.int32))


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [64, 128, 192])
def test_keys_of_any_width_come_back_from_the_pool(
    width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Each token has its own row, whatever lies around it; S layers have no memory at all."""
    plan = SimpleNamespace(index_k_dtype=str(dtype).removeprefix("torch."))
    monkeypatch.setattr(indexer_cpu, "published_plan", lambda: plan)
    pool = make_pool(width)
    assert pool.index_head_dim == width
    cache = pool.index_key_cache
    assert [buffer.numel() for buffer in cache.buffer] == [3 * 64 * width, 0]
    cache.buffer[0].fill_(math.nan)
    slots = torch.randperm(150, generator=torch.Generator().manual_seed(seed))[:100]
    keys = torch.randn(100, width, generator=torch.Generator().manual_seed(seed)).to(dtype)
    cache.store(0, slots[:50], keys[:50])
    cache.store(0, slots[50:], keys[50:])
    assert torch.equal(cache.load(0, slots), keys)
    unused = sorted(set(range(3 * 64)) - set(slots.tolist()))
    assert cache.load(0, torch.tensor(unused)).isnan().all()


def make_pool(width: int) -> indexer_cpu.CpuDSATokenToKVPool:
    """128 tokens in pages of 64 and SGLang's spare one, for an F and an S layer."""
    return indexer_cpu.CpuDSATokenToKVPool(
        128,
        64,
        kv_lora_rank=8,
        dtype=torch.float32,
        qk_rope_head_dim=4,
        layer_num=2,
        device="cpu",
        index_head_dim=width,
        enable_memory_saver=False,
        kv_cache_dim=12,
        index_buf_size=128,
        skip_topk_layers=[False, True],
    )
