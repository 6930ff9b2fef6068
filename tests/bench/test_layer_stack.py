"""The layer stack: what it computes, and what it makes of its timings."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear, rms_norm, silu

from sglang_indexcache.bench.environment import environment
from sglang_indexcache.bench.errors import BenchError
from sglang_indexcache.bench.layer_stack import (
    INDEXER_STAGES,
    STAGES,
    NoStopwatch,
    Row,
    Stack,
    Stopwatch,
    run,
)
from sglang_indexcache.bench.ops import CpuOps, Geometry, load_ops
from sglang_indexcache.bench.shapes import PRESETS, Shape, shape_of
from sglang_indexcache.kernels.indexer.reference import indexer_logits
from sglang_indexcache.kernels.sparse_mla.reference import sparse_mla
from sglang_indexcache.kernels.topk.reference import topk_ascending

TINY = Shape(
    name="tiny", layers=6, hidden=64, heads=3, q_lora=32, kv_lora=48, nope=16, rope=8, v=16,
    index_heads=4, topk=16, experts=6, active_experts=2, expert_width=32, dense_layers=0,
    dense_width=64, vocab=100,
)  # fmt: skip


def stack(layers: int = 2, slots: int = 256) -> Stack:
    return Stack(TINY, layers, CpuOps(), slots, torch.bfloat16, seed=3)


def test_a_chunk_selects_and_attends_as_the_references_do() -> None:
    layer = stack().layers[0]
    made = stack(slots=128)
    geometry = Geometry(1, 40, 100, 128, "cpu")
    earlier = Geometry(1, 60, 60, 128, "cpu")
    with torch.inference_mode():
        x = made.inputs(100)
        layer.forward(x[:60], earlier, None, NoStopwatch())
        after, slots = layer.forward(x[60:], geometry, None, NoStopwatch())
        normed = rms_norm(x[60:], (64,))
        q_low = rms_norm(linear(normed, layer.down)[:, :32], (32,))
        queries = linear(q_low, layer.index_q).view(-1, 4, 128)
        gates = linear(normed, layer.gates).float() * 4**-0.5
        logits = indexer_logits(queries, layer.index_keys[:100], gates)
        expected = topk_ascending(logits, torch.arange(61, 101), 16)
        # bfloat16 products round otherwise than float32 ones: a near-tie may fall the other way.
        agreement = torch.isin(
            slots + 1000 * torch.arange(40)[:, None], expected + 1000 * torch.arange(40)[:, None]
        )
        assert agreement.float().mean() > 0.95
        q = linear(q_low, layer.q_up).view(-1, 3, 24)
        absorbed = torch.einsum("thn,hnk->thk", q[..., :16], layer.k_absorb)
        attended, _ = sparse_mla(
            torch.cat([absorbed, q[..., 16:]], -1), layer.latent, slots, 24**-0.5, 48
        )
        heads = torch.einsum("thk,hkv->thv", attended, layer.v_absorb).reshape(40, -1)
        middle = x[60:] + linear(heads, layer.out)
        got = after - middle  # what the experts added
        assert torch.isfinite(after).all()
        wanted = layer._experts(rms_norm(middle, (64,)))
        torch.testing.assert_close(got, wanted, rtol=0.1, atol=0.15)


def test_experts_are_those_of_a_loop() -> None:
    layer = stack().layers[0]
    with torch.inference_mode():
        x = torch.randn(5, 64).to(torch.bfloat16)
        got = layer._experts(x)
        scores = torch.sigmoid(linear(x, layer.router)).topk(2, dim=-1).values
        expected = torch.zeros(5, 64)
        for row in range(10):  # five tokens, two rows each, two rows an expert
            expert, token = row // 2, row // 2
            gate, up = (x[token] @ layer.expert_in[expert]).chunk(2)
            done = (silu(gate) * up) @ layer.expert_out[expert]
            expected[token] += (done * scores[token, row % 2]).float()
        gate, up = linear(x, layer.shared_in).chunk(2, dim=-1)
        expected += linear(silu(gate) * up, layer.shared_out).float()
    torch.testing.assert_close(got.float(), expected, rtol=0.05, atol=0.02)


def test_a_shared_layer_runs_no_indexer() -> None:
    made = stack(layers=3)
    watch = Stopwatch("cpu")
    before = [layer.index_keys.clone() for layer in made.layers]
    with torch.inference_mode():
        geometry = Geometry(1, 50, 50, 256, "cpu")
        x = made.inputs(50)
        shared = torch.arange(16, dtype=torch.int32).repeat(50, 1)
        got = made.forward(x, geometry, shared, watch)
        untouched = [
            torch.equal(old, layer.index_keys)
            for old, layer in zip(before, made.layers, strict=True)
        ]
        assert untouched == [True] * 3
        assert torch.equal(got, shared)
        spent = watch.read()
        assert all((spent[name] > 0) == (name not in INDEXER_STAGES) for name in STAGES)
        made.forward(x, geometry, None, watch)
        assert all(watch.read()[name] > 0 for name in STAGES)


def test_requests_keep_to_their_own_slots() -> None:
    made = stack(slots=256)
    geometry = Geometry(2, 1, 70, 128, "cpu")
    with torch.inference_mode():
        slots = made.forward(made.inputs(2), geometry, None, NoStopwatch())
    assert slots[0].max() < 70
    assert slots[1].min() >= 128
    assert slots[1].max() < 198


def test_a_run() -> None:
    result = run(TINY, CpuOps(), (64, 160), layers=3, chunk=64, repeats=2, requests=(1, 3))
    assert [(r.phase, r.length, r.requests) for r in result.rows] == [
        ("prefill", 64, 1), ("decode", 64, 1), ("decode", 64, 3),
        ("prefill", 160, 1), ("decode", 160, 1), ("decode", 160, 3),
    ]  # fmt: skip
    for row in result.rows:
        assert 0 < row.indexer_share < 1
        assert row.full_total > 0
        assert row.shared_total > 0
        if row.phase == "prefill":
            assert row.neighbour_overlap is not None
            assert 0 < row.neighbour_overlap <= 1


def test_what_follows_from_a_row() -> None:
    stages = dict(zip(STAGES, (1.0, 4.0, 2.0, 2.0, 1.0), strict=True))
    row = Row(
        phase="prefill", length=8, requests=1, full_layer=stages,
        shared_layer={**stages, **dict.fromkeys(INDEXER_STAGES, 0.0)},
        full_total=10.0, shared_total=5.0, neighbour_overlap=None,
    )  # fmt: skip
    assert row.indexer_share == 0.5
    assert row.realised == 1.0
    assert row.seconds(2, 3) == 35.0


def test_what_cannot_be_run() -> None:
    with pytest.raises(BenchError, match="at least 1"):
        run(TINY, CpuOps(), (), layers=2, chunk=64, repeats=1)
    with pytest.raises(BenchError, match="run on a CPU"):
        load_ops("cpu", "cuda", (32, 20, 2048))
    with pytest.raises(BenchError, match="there are 30b, glm-5, deepseek"):
        shape_of("glm-6")


def test_presets_are_the_published_models() -> None:
    """Totals of the model cards: 30B with 3B active, 744B, 671B."""
    billions = {"30b": 30, "glm-5": 744, "deepseek-v3.2": 671}
    for name, shape in PRESETS.items():
        moe = shape.layers - shape.dense_layers
        expert = 3 * shape.hidden * shape.expert_width
        total = (
            shape.layers * (shape.attention_parameters + shape.indexer_parameters)
            + moe * (shape.experts + shape.shared_experts) * expert
            + shape.dense_layers * 3 * shape.hidden * shape.dense_width
            + 2 * shape.vocab * shape.hidden
        )
        assert total / 1e9 == pytest.approx(billions[name], rel=0.03)


def test_the_environment_says_where() -> None:
    machine = environment()
    assert machine.cores >= 1
    assert machine.versions["torch"]
