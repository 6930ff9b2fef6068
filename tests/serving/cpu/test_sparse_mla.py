"""Sparse MLA on a CPU: the blocked path against the reference."""

import pytest
import torch

from sglang_indexcache.kernels.sparse_mla.reference import sparse_mla as reference
from sglang_indexcache.serving.cpu import backend
from sglang_indexcache.serving.cpu.backend import sparse_mla


def selection(tokens: int, topk: int, slots: int, generator: torch.Generator) -> torch.Tensor:
    """Random lists of 0 to ``topk`` slots, with padding anywhere."""
    rows = torch.full((tokens, topk), -1, dtype=torch.int32)
    for t in range(tokens):
        count = int(torch.randint(0, min(topk, slots) + 1, (1,), generator=generator))
        rows[t, :count] = torch.randperm(slots, generator=generator)[:count].to(torch.int32)
    return rows[:, torch.randperm(topk, generator=generator)]


@pytest.mark.parametrize("heads", [1, 3, 8, 20, 128])
@pytest.mark.parametrize("gather_bytes", [1, 30_000, 4 << 20])
def test_blocked_path_equals_reference(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch, heads: int, gather_bytes: int
) -> None:
    monkeypatch.setattr(backend, "GATHER_BYTES", gather_bytes)
    q = torch.randn(23, heads, 40, generator=generator)
    latent = torch.randn(300, 40, generator=generator)
    slots = selection(23, 33, 300, generator)
    slots[5] = -1
    output = sparse_mla(q, latent, slots, 0.2, 24)
    expected, _ = reference(q, latent, slots, 0.2, 24)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    assert (output[5] == 0).all()


def test_bfloat16(generator: torch.Generator) -> None:
    q = torch.randn(40, 8, 192, generator=generator).bfloat16()
    latent = torch.randn(500, 192, generator=generator).bfloat16()
    slots = selection(40, 64, 500, generator)
    output = sparse_mla(q, latent, slots, 192**-0.5, 128)
    expected, _ = reference(q, latent, slots, 192**-0.5, 128)
    # Scores and weights are rounded to bfloat16 (2^-9 relative) before and after the softmax.
    torch.testing.assert_close(output, expected, rtol=2**-6, atol=2**-6)


def test_never_reads_what_is_not_selected(generator: torch.Generator) -> None:
    latent = torch.full((100, 16), float("nan"))
    latent[10:15] = torch.randn(5, 16, generator=generator)
    slots = torch.full((4, 6), -1, dtype=torch.int32)
    slots[:3, :5] = torch.arange(10, 15, dtype=torch.int32)
    output = sparse_mla(torch.randn(4, 2, 16, generator=generator), latent, slots, 1.0, 8)
    assert torch.isfinite(output).all()
    assert (output[3] == 0).all()


def test_no_tokens() -> None:
    output = sparse_mla(
        torch.empty(0, 2, 16), torch.zeros(4, 16), torch.empty(0, 3, dtype=torch.int32), 1.0, 8
    )
    assert output.shape == (0, 2, 8)
