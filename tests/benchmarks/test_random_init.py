"""Weights and caches of timed models are not degenerate, and SGLang's dummy ones are.

What a server makes of them, its routing and its index keys, is measured in
``test_table_1.py``.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from benchmarks.card import random_init
from sglang_indexcache.kernels.contract import FP8_ROW_BYTES, LATENT_DIM, PAGE_BYTES, VALUE_DIM
from sglang_indexcache.kernels.sparse_mla.reference import dequantize_latent

HIDDEN, EXPERTS, A_TOKEN, WIDTH, TOKENS = 512, 64, 4, 128, 2048


class Layer(torch.nn.Module):
    """A router, a norm and an indexer's key projection in FP8, named as SGLang names them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.e_score_correction_bias = torch.nn.Parameter(torch.empty(EXPERTS))
        self.input_layernorm = torch.nn.Parameter(torch.empty(HIDDEN))
        self.embed_tokens = torch.nn.Embedding(TOKENS, HIDDEN)
        wk = torch.empty(WIDTH, HIDDEN).to(torch.float8_e4m3fn)
        self.wk = torch.nn.Parameter(wk, requires_grad=False)
        self.register_buffer("wk_weight_scale_inv", torch.empty(WIDTH // 128, HIDDEN // 128))
        self.register_buffer("k_scale", torch.empty(()))

    def hidden(self) -> torch.Tensor:
        return torch.nn.functional.rms_norm(
            self.embed_tokens.weight, (HIDDEN,), self.input_layernorm, 1e-5
        )

    def busiest(self) -> float:
        """Return the share of the tokens that the busiest expert takes."""
        scores = self.gate(self.hidden()).sigmoid() + self.e_score_correction_bias
        counts = torch.bincount(scores.topk(A_TOKEN, -1).indices.flatten(), minlength=EXPERTS)
        return float(counts.max() / TOKENS)

    def keys(self) -> torch.Tensor:
        scale = self.wk_weight_scale_inv.repeat_interleave(128, 1)
        return self.hidden() @ (self.wk.float() * scale).T


def dummy(model: torch.nn.Module) -> None:
    """Draw as ``--load-format dummy`` does: all within 1e-3 of zero, from one seed each."""
    for name, tensor in model.state_dict().items():
        generator = torch.Generator().manual_seed(1234)
        drawn = torch.empty(tensor.shape).uniform_(-1e-3, 1e-3, generator=generator)
        tensor.copy_(torch.ones_like(drawn) if name.endswith("scale_inv") else drawn)


@torch.no_grad()
def test_tokens_spread_over_the_experts_and_index_keys_differ() -> None:
    model = Layer()
    random_init.initialize(model)
    assert model.busiest() < 2 * A_TOKEN / EXPERTS
    assert len(model.keys().unique(dim=0)) == TOKENS
    assert model.keys().std() == pytest.approx(1, rel=0.1), "a product keeps unit variance"
    assert model.k_scale == 1
    dummy(model)
    assert model.busiest() > 0.5, "without it an expert takes most of the tokens"
    assert (model.wk.float() == 0).float().mean() > 0.9


@torch.no_grad()
def test_tensors_of_one_shape_differ_and_are_the_same_again() -> None:
    layers = torch.nn.ModuleList([Layer(), Layer()])
    random_init.initialize(layers)
    first, second = layers
    assert not torch.equal(first.gate.weight, second.gate.weight)
    assert not torch.equal(first.wk.float(), second.wk.float())
    before = first.gate.weight.clone()
    random_init.initialize(layers)
    assert torch.equal(first.gate.weight, before)


def test_a_filled_pool_holds_finite_values_that_differ() -> None:
    latents = torch.zeros(256, 1, FP8_ROW_BYTES, dtype=torch.uint8)
    pages = torch.zeros(4, PAGE_BYTES, dtype=torch.uint8)
    plain = torch.zeros(64, 1, LATENT_DIM, dtype=torch.bfloat16)
    random_init.fill(
        SimpleNamespace(kv_buffer=[latents, plain], index_k_with_scale_buffer=[pages, pages[:0]])
    )
    rows = dequantize_latent(latents[:, 0])
    assert rows.isfinite().all()
    assert rows[:, :VALUE_DIM].float().std() == pytest.approx(1, rel=0.1)
    assert plain.isfinite().all()
    assert len(plain.flatten(1).float().unique(dim=0)) == 64
    values = pages[:, : 64 * 128].reshape(-1, 128)
    assert len(values.unique(dim=0)) == 256
    assert pages[:, 64 * 128 :].contiguous().view(torch.float32).isfinite().all()
