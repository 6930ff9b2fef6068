"""The references against transformers, SGLang's own torch, and exact arithmetic."""

from typing import Any

import pytest
import torch
from transformers import GlmMoeDsaConfig
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as glm

from sglang_indexcache.kernels.contract import IndexerBatch
from sglang_indexcache.kernels.indexer import reference as indexer
from sglang_indexcache.kernels.indexer.quantization import (
    quantize_e4m3,
    write_pages,
)
from sglang_indexcache.kernels.sparse_mla import reference as sparse_mla
from sglang_indexcache.kernels.sparse_mla.reference import dequantize_latent, quantize_latent

TOKENS, HEADS, TOPK = 150, 16, 40


class Recorded:
    """transformers' indexer on random states: what it multiplied and what it scored."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, generator: torch.Generator) -> None:
        config = GlmMoeDsaConfig(
            hidden_size=64, q_lora_rank=32, index_n_heads=HEADS, index_head_dim=128, index_topk=TOPK
        )
        module = glm.GlmMoeDsaIndexer(config, 0).double()
        for parameter in module.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        width = config.qk_rope_head_dim
        angles = torch.rand(1, TOKENS, width, generator=generator)
        states = torch.randn(1, TOKENS, 64, generator=generator, dtype=torch.float64)
        residual = torch.randn(1, TOKENS, 32, generator=generator, dtype=torch.float64)
        causal = torch.ones(1, TOKENS, TOKENS, dtype=torch.bool).tril()
        products: list[tuple[torch.Tensor, torch.Tensor]] = []
        original = torch.matmul

        def stored_as_fp8(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            products.append((a, b))
            if len(products) == 1:
                a, b = restored(a), restored(b.mT).mT
            return original(a.double(), b.double())

        monkeypatch.setattr(torch, "matmul", stored_as_fp8)
        monkeypatch.setattr(torch.Tensor, "topk", self._watch(torch.Tensor.topk))
        module(states, residual, (angles.cos(), angles.sin()), causal, None)
        monkeypatch.undo()
        self.q, self.keys = products[0][0][0], products[0][1][0, 0].T
        self.gates = (products[1][0][0, :, 0] * module.softmax_scale).float()

    def _watch(self, original: Any) -> Any:
        def watched(scores: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.scores = scores[0]
            return original(scores, *args, **kwargs)

        return watched


def restored(x: torch.Tensor) -> torch.Tensor:
    values, scales = quantize_e4m3(x)
    return values.double() * scales.double()[..., None]


def test_the_whole_indexer_is_transformers(
    monkeypatch: pytest.MonkeyPatch, generator: torch.Generator
) -> None:
    """Quantise, page, score and select as transformers does on the same quantised vectors."""
    theirs = Recorded(monkeypatch, generator)
    order = torch.randperm(5, generator=generator)
    table = order[None, :3].to(torch.int32)
    pages = torch.full((5, 8448), 0x7F, dtype=torch.uint8)
    slots = indexer.slots_of(torch.arange(TOKENS), table[0])
    write_pages(pages, slots, *quantize_e4m3(theirs.keys))
    q, scales = quantize_e4m3(theirs.q)
    weights = theirs.gates * scales  # relu(scale * x) = scale * relu(x)
    starts = torch.tensor([0, TOKENS], dtype=torch.int32)
    visible = torch.arange(1, TOKENS + 1, dtype=torch.int32)
    batch = IndexerBatch(q, weights, pages, table, visible, starts)
    logits = indexer.logits(batch, TOKENS)
    sees = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    magnitude = float(theirs.scores[sees].abs().max())
    error = (logits.double() - theirs.scores)[sees].abs().max()
    assert float(error) <= magnitude * 2.0**-20
    selection = indexer.select(batch, TOPK)
    for row in range(TOKENS):
        valid = selection[row][selection[row] >= 0].long()
        best = theirs.scores[row].topk(min(TOPK, row + 1)).values
        torch.testing.assert_close(
            theirs.scores[row][valid].sort(descending=True).values,
            best,
            rtol=0,
            atol=magnitude * 2.0**-19,
        )


def logits_of(weights: list[float], value: float) -> float:
    """Return one logit where every head's dot product is ``value``."""
    heads = len(weights)
    q = torch.zeros(1, heads, 128)
    q[:, :, 5] = value
    key = torch.zeros(1, 128)
    key[0, 5] = 1.0
    fp8 = torch.float8_e4m3fn
    return float(
        indexer.logits_in_order(q.to(fp8), key.to(fp8), torch.tensor([weights]), torch.ones(1))
    )


def test_heads_are_summed_in_four_parts() -> None:
    """The sum 2^24 + 1 + 1 depends on the order in float32."""
    big = 2.0**24
    zeros = [0.0] * 4
    assert logits_of([big, 1.0, 0.0, 0.0, *zeros], 1.0) == big  # one part
    assert logits_of([big, 0.0, 1.0, 1.0, *zeros], 1.0) == big + 2  # the ones meet first
    assert logits_of([big, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0], 1.0) == big  # parts 0, 1 | 2, 3
    assert logits_of([big, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0], 1.0) == big + 2
    # Heads 0 and 8 are in one part, head 2 is not.
    assert logits_of([big, 0, 1.0, 0, 0, 0, 0, 0, -big, 0, 0, 0, 0, 0, 0, 0], 1.0) == 1.0


def test_heads_are_added_by_fused_multiply_add() -> None:
    """-1.125 + (1 + 2^-23) * 1.125 would be 2^-23 if it were rounded before the addition."""
    assert logits_of([-1.0, 1 + 2.0**-23, 0, 0, 0, 0, 0, 0], 1.125) == 1.125 * 2.0**-23


def test_logits_do_not_depend_on_the_batch(generator: torch.Generator) -> None:
    q = quantize_e4m3(torch.randn(37, 8, 128, generator=generator))[0]
    keys, scales = quantize_e4m3(torch.randn(211, 128, generator=generator))
    weights = torch.randn(37, 8, generator=generator)
    together = indexer.logits_in_order(q, keys, weights, scales)
    for t, s in [(0, 0), (36, 210), (17, 101)]:
        alone = indexer.logits_in_order(
            q[t : t + 1], keys[s : s + 1], weights[t : t + 1], scales[s : s + 1]
        )
        assert torch.equal(alone[0, 0], together[t, s])


@pytest.mark.parametrize("sinks", [False, True])
def test_sparse_mla_is_transformers_masked_attention(
    generator: torch.Generator, sinks: bool
) -> None:
    """A sink is a key whose score is the sink and whose value is zero."""
    tokens, heads, pool = 5, 6, 60
    q = torch.randn(tokens, heads, 576, generator=generator, dtype=torch.float64)
    latent = torch.randn(pool, 576, generator=generator, dtype=torch.float64)
    slots = torch.stack([torch.randperm(pool, generator=generator)[:20] for _ in range(tokens)])
    extra = torch.randn(heads, generator=generator) if sinks else None
    mask = torch.full((1, heads, tokens, pool + 1), float("-inf"), dtype=torch.float64)
    mask[..., :pool].scatter_(3, slots.expand(1, heads, tokens, 20), 0.0)
    if extra is not None:
        mask[..., pool] = extra.double()[None, :, None]
    rows = torch.cat([latent, torch.zeros(1, 576, dtype=torch.float64)])
    module = type("Module", (), {"num_key_value_groups": heads, "training": False})()
    expected, weights = glm.eager_attention_forward(
        module, q.transpose(0, 1)[None], rows[None, None], rows[None, None, :, :512], mask, 0.04
    )
    out, lse = sparse_mla.sparse_mla(q, latent, slots.int(), 0.04, sinks=extra)
    # transformers rounds the probabilities to float32.
    torch.testing.assert_close(out, expected[0], rtol=1e-5, atol=1e-6)
    best = weights[0, :, :, :pool].amax(-1).T  # the probability of the best key gives the LSE
    scores = torch.einsum("thd,sd->ths", q, latent) * 0.04 + mask[0, 0, :, None, :pool]
    total = scores.amax(-1) - best.log()
    if extra is not None:
        total = torch.log(total.exp() - extra.double().exp())
    torch.testing.assert_close(lse.double(), total, rtol=1e-5, atol=1e-5)


def test_fp8_rows_are_sglangs(generator: torch.Generator) -> None:
    """Scales and rotary part bit for bit; SGLang's torch divides where its kernel multiplies."""
    from sglang.test.kernels.dsa_k_cache_reference import _quantize_k_cache_ref

    rows = torch.randn(70, 576, generator=generator)
    rows *= torch.exp(3 * torch.randn(70, 1, generator=generator))
    rows = rows.bfloat16()
    # SGLang computes the scale in bfloat16 unless the rows are wider.
    wide = rows.float()
    theirs = _quantize_k_cache_ref(wide[:, None, None])[:, 0, 0].view(torch.uint8)
    ours = quantize_latent(rows)
    assert torch.equal(ours[:, 512:528], theirs[:, 512:528])
    assert torch.equal(ours[:, 528:].view(torch.bfloat16), rows[:, 512:])
    assert (ours[:, :512] != theirs[:, :512]).float().mean() < 1e-3


def test_fp8_rows_restore_within_half_a_step(generator: torch.Generator) -> None:
    rows = (torch.randn(50, 576, generator=generator) * 30).bfloat16()
    rows[7, 128:256] = 0.0
    restored_rows = dequantize_latent(quantize_latent(rows))
    assert torch.equal(restored_rows[:, 512:], rows[:, 512:])
    assert (restored_rows[7, 128:256] == 0).all()
    groups = rows[:, :512].float().unflatten(1, (4, 128))
    step = groups.abs().amax(-1, keepdim=True) / 448 * 2.0**-10  # half the smallest subnormal
    bound = torch.maximum(groups.abs() * (2.0**-4 + 2.0**-8), step * 1.01)
    error = (restored_rows[:, :512].float().unflatten(1, (4, 128)) - groups).abs()
    assert (error <= bound).all()
