"""The layer stack: what it computes, and what it makes of its timings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import linear, rms_norm, silu

from benchmarks import engine_kernels
from benchmarks.stack.measure import (
    CORRELATION,
    NoStopwatch,
    Stack,
    Stopwatch,
    _overlap,
    correlated,
    prefill,
    run,
)
from benchmarks.stack.ops import CpuOps, Geometry, load_ops
from sglang_indexcache.bench.environment import environment
from sglang_indexcache.bench.layer_stack import INDEXER_STAGES, STAGES, Row
from sglang_indexcache.bench.shapes import PRESETS, ModelShape, shape_of
from sglang_indexcache.errors import BenchError, CheckpointError, KernelError
from sglang_indexcache.kernels.indexer.quantization import quantize_e4m3, read_pages
from sglang_indexcache.kernels.indexer.reference import indexer_logits
from sglang_indexcache.kernels.sparse_mla.reference import sparse_mla
from sglang_indexcache.kernels.topk import reference as topk_reference

TINY = ModelShape(
    name="tiny", layers=6, hidden=64, heads=3, q_lora=32, kv_lora=48, nope=16, rope=8, v=16,
    index_heads=4, topk=16, experts=6, active_experts=2, expert_width=32, dense_layers=0,
    dense_width=64, vocab=100,
)  # fmt: skip


REAL_WIDTHS = TINY.model_copy(
    update={"name": "real widths", "kv_lora": 512, "rope": 64, "index_heads": 8, "heads": 20}
)
"""What the kernels' contract fixes: index keys of 128, latent rows of 512 + 64."""


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
        expected = topk_reference.topk(logits, torch.arange(61, 101), 16)
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
    with pytest.raises(BenchError, match="tiny has 6 layers, 7 cannot be run"):
        run(TINY, CpuOps(), (64,), layers=7, chunk=64, repeats=1)
    with pytest.raises(BenchError, match="run on a CPU with bfloat16 rows"):
        load_ops("cpu", "cpu", TINY, fp8_kv=True)
    with pytest.raises(BenchError, match="the kernels are cpu, auto, engine, cuda"):
        load_ops("fast", "cpu", TINY)
    with pytest.raises(BenchError, match="the device is cpu or cuda"):
        load_ops("cpu", "tpu", TINY)
    with pytest.raises(BenchError, match="latent rows of 576 bfloat16, this model has 56"):
        run(TINY, load_ops("reference", "cpu", TINY), (64,), layers=1, chunk=64, repeats=1)
    narrow = REAL_WIDTHS.model_copy(update={"index_dim": 64})
    with pytest.raises(BenchError, match="index keys of 128, this model has 64"):
        run(narrow, load_ops("reference", "cpu", narrow), (64,), layers=1, chunk=64, repeats=1)
    assert run(narrow, CpuOps(), (64,), layers=1, chunk=64, repeats=1).rows
    if not torch.cuda.is_available():
        with pytest.raises(BenchError, match="torch sees no GPU"):
            load_ops("auto", "cuda", TINY)
        with pytest.raises(KernelError, match="cuda cannot run on CPU: needs an NVIDIA GPU"):
            load_ops("cuda", "cpu", REAL_WIDTHS)
    with pytest.raises(BenchError, match="no folder; there are 30b, glm-5, deepseek"):
        shape_of("glm-6")


def test_a_folder_without_a_dsa_config(tmp_path: Path) -> None:
    for text, message in (
        (None, "cannot read"),
        ("{", "is not JSON"),
        ('{"hidden_size": 8, "num_hidden_layers": 1}', "has no 'num_attention_heads'"),
    ):
        if text is not None:
            (tmp_path / "config.json").write_text(text)
        with pytest.raises((BenchError, CheckpointError), match=message):
            shape_of(str(tmp_path))


def test_hidden_states_correlate_as_stated() -> None:
    noise = torch.randn(700, 3)
    got = correlated(noise.clone(), block=64)
    before = noise[0]
    for row, fresh in zip(got[1:], noise[1:], strict=True):
        torch.testing.assert_close(row, CORRELATION * before + (1 - CORRELATION**2) ** 0.5 * fresh)
        before = row
    torch.testing.assert_close(got[0], noise[0])  # (1 - fresh) + fresh rounds


def test_chunks_of_a_prompt_are_different_text() -> None:
    """Equal chunks would give every index key a twin in each: ties, and too much locality."""
    seen: list[torch.Tensor] = []

    class Recording(CpuOps):
        def store_keys(self, cache: torch.Tensor, where: torch.Tensor, keys: torch.Tensor) -> None:
            super().store_keys(cache, where, keys)
            seen.append(cache)

    with torch.inference_mode():
        made = Stack(TINY, 1, Recording(), 256)
        prefill(made, 256, 64, 1)
        keys = seen[-1][:256]
    assert len({tuple(row.tolist()) for row in keys}) == 256


def test_requests_of_a_decode_step_have_keys_of_their_own() -> None:
    """Not zeros: every position would tie."""
    made = stack(slots=512)
    for layer in made.layers:
        assert (layer.index_keys != 0).any(-1).all()
        assert layer.latent.float().std() == pytest.approx(1.0, rel=0.05)


def test_neighbours_of_a_short_chunk() -> None:
    rows = torch.tensor([[0, 1, 2, 3], [2, 3, 4, 5], [2, 3, 4, -1]])
    assert _overlap(rows) == pytest.approx((0.5 + 0.75) / 2)
    assert _overlap(rows[:1]) is None


# -- the kernels by their contract, against dense arithmetic -------------------------------------

IMPLEMENTATIONS = [
    "reference",
    pytest.param(
        "triton",
        marks=pytest.mark.skipif(
            os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"
        ),
    ),
]


@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "geometry",
    [
        Geometry(1, 37, 150, 192, "cpu"),
        Geometry(1, 30, 30, 192, "cpu"),
        Geometry(3, 1, 150, 192, "cpu"),
    ],
    ids=["a later chunk", "a first chunk", "decode"],
)
def test_dispatched_kernels_select_what_dense_scores_say(kernels: str, geometry: Geometry) -> None:
    ops = load_ops(kernels, "cpu", REAL_WIDTHS)
    slots, rows = 3 * 192, geometry.requests * geometry.queries
    cache = ops.index_cache(slots, 128, torch.bfloat16)
    cache.fill_(0x7F)  # NaN, in keys and in scales
    for request in range(geometry.requests):
        where = geometry.slots[request]
        ops.store_keys(cache, where, torch.randn(len(where), 128).bfloat16())
    q, gates = torch.randn(rows, 8, 128).bfloat16(), torch.randn(rows, 8)
    found = ops.select(q, gates, cache, geometry, 16)
    assert found.shape == (rows, 16)
    assert found.dtype == torch.int32
    for row in range(rows):
        request = row // geometry.queries
        mine = geometry.slots[request][: int(geometry.visible[row])]
        values, scales = read_pages(cache, mine, 128)
        keys = values.double() * scales.double()[:, None]
        rounded, scale = quantize_e4m3(q[row])
        products = (rounded.double() * scale.double()[:, None]) @ keys.T
        logits = gates[row].double() @ products.relu()
        chosen = found[row][found[row] >= 0].long() - mine[0]
        assert len(chosen) == min(16, len(mine))
        assert torch.equal(chosen, chosen.unique())  # ascending, each once
        least = logits.topk(len(chosen)).values[-1]
        assert (logits[chosen] >= least - 1e-4 * logits.abs().max()).all()


@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
@pytest.mark.parametrize("fp8", [False, True], ids=["bfloat16", "fp8"])
def test_dispatched_kernels_attend_as_a_softmax(kernels: str, fp8: bool) -> None:
    ops = load_ops(kernels, "cpu", REAL_WIDTHS, fp8_kv=fp8)
    latent = ops.latent_cache(100, 576, torch.bfloat16)
    assert latent.shape == (128, 656 if fp8 else 576)  # whole pages
    rows = torch.randn(100, 576).bfloat16()
    ops.store_latent(latent, torch.arange(100), rows)
    q = torch.randn(3, 20, 576).bfloat16()
    slots = torch.full((3, 16), -1, dtype=torch.int32)
    for row, count in enumerate((16, 5, 1)):
        slots[row, :count] = torch.randperm(100)[:count].sort().values
    got = ops.attend(q, latent, slots, 0.05, 512)
    for row in range(3):
        chosen = rows[slots[row][slots[row] >= 0].long()].double()
        weights = (q[row].double() @ chosen.T * 0.05).softmax(-1)
        # e4m3 keeps 4 bits: a sixteenth of a value at most, less in a mean.
        torch.testing.assert_close(
            got[row].double(), weights @ chosen[:, :512], rtol=0.02, atol=0.15 if fp8 else 0.02
        )


@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
@pytest.mark.parametrize("fp8", [False, True], ids=["bfloat16", "fp8"])
def test_a_run_with_dispatched_kernels(kernels: str, fp8: bool) -> None:
    ops = load_ops(kernels, "cpu", REAL_WIDTHS, fp8_kv=fp8)
    result = run(REAL_WIDTHS, ops, (70,), layers=1, chunk=40, repeats=1, requests=(1, 2))
    assert (result.kernels, result.kv) == (kernels, "fp8" if fp8 else "bfloat16")
    assert [(r.phase, r.requests) for r in result.rows] == [
        ("prefill", 1), ("decode", 1), ("decode", 2),
    ]  # fmt: skip
    assert all(0 < row.indexer_share < 1 for row in result.rows)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="already interpreting")
def test_triton_in_a_process_of_its_own() -> None:
    """The interpreter is chosen at Triton's first import."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(
        [*command, "-k", "triton and (select or attend)"],
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "5 passed" in done.stdout


def test_auto_is_the_best_that_runs_here() -> None:
    ops = load_ops("auto", "cpu", REAL_WIDTHS)
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        assert ops.name == "auto: reference"


# -- the engine's kernels, whose call conventions are replaced by their meaning ------------------


def fake_engine(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """DeepGEMM, SGLang's top-k and FlashMLA as their documentation describes them, in torch.

    Returns:
        By how much of itself the last score that each row selects is above the next one.
    """
    gaps: list[float] = []

    def mqa_logits(q, keys, weights, starts, ends, *, clean_logits):  # type: ignore[no-untyped-def]
        values, scales = keys
        assert not clean_logits
        assert q.dtype == values.dtype == torch.float8_e4m3fn
        assert int(starts.abs().sum()) == 0
        dots = torch.einsum("thd,sd->ths", q.float(), values.float()).relu()
        logits = torch.einsum("ths,th->ts", dots, weights) * scales
        return logits.masked_fill(torch.arange(len(values)) >= ends[:, None], float("nan"))

    def paged(q, pages, weights, lens, table, _schedule, longest, *, clean_logits):  # type: ignore[no-untyped-def]
        assert pages.shape[1:] == (64, 1, 132)
        assert lens.shape == (len(q), 1)
        flat = pages.reshape(len(pages), -1)
        rows = []
        for request in range(len(q)):
            slots = (table[request].long()[:, None] * 64 + torch.arange(64)).flatten()[:longest]
            rows.append(
                mqa_logits(
                    q[request], read_pages(flat, slots, 128), weights[request : request + 1],
                    lens[request] * 0, lens[request], clean_logits=clean_logits,
                )[0]
            )  # fmt: skip
        return torch.stack(rows)

    def ragged(logits, lens, *, out_offsets, out_indices):  # type: ignore[no-untyped-def]
        out_indices.fill_(-1)
        for row, seen in enumerate(lens.tolist()):
            ranked = logits[row, :seen].topk(min(out_indices.shape[1] + 1, seen))
            best = ranked.indices[: out_indices.shape[1]]
            last, following = ranked.values[-2:]
            gaps.append(float((last - following) / last.abs()))
            out_indices[row, : len(best)] = (best + out_offsets[row]).to(torch.int32)

    def paged_topk(logits, lens, table, out, page, plan):  # type: ignore[no-untyped-def]
        assert plan == "plan"
        ragged(logits, lens, out_offsets=lens * 0, out_indices=out)
        slots = table.gather(1, out.clamp_min(0).long() // page) * page + out % page
        out.copy_(torch.where(out < 0, out, slots))

    def sparse(q, cache, slots, scale):  # type: ignore[no-untyped-def]
        assert q.shape[1] in (64, 128)
        assert cache.shape[1] == slots.shape[1] == 1
        out, lse = sparse_mla(q, cache[:, 0], slots[:, 0], scale)
        return out, lse, lse

    def with_kvcache(q, cache, _table, _lens, values, _plan, _splits, **named):  # type: ignore[no-untyped-def]
        assert q.shape[1] == named["indices"].shape[1] == 1
        assert cache.shape[1:] == (64, 1, 656)
        assert named["is_fp8_kvcache"]
        rows = cache.view(torch.uint8).reshape(-1, 656)
        out, lse = sparse_mla(q[:, 0], rows, named["indices"][:, 0], named["softmax_scale"], values)
        return out[:, None], lse

    modules = {
        "deep_gemm": SimpleNamespace(
            fp8_mqa_logits=mqa_logits,
            fp8_paged_mqa_logits=paged,
            get_paged_mqa_logits_metadata=lambda *_: None,
        ),
        engine_kernels.ENGINE_MODULES[1]: SimpleNamespace(
            topk_transform_ragged_v2=ragged,
            topk_transform_paged_v2=paged_topk,
            plan_topk_v2=lambda _: "plan",
        ),
        "flash_mla": SimpleNamespace(
            flash_mla_sparse_fwd=sparse,
            flash_mla_with_kvcache=with_kvcache,
            get_mla_metadata=lambda: (None, None),
        ),
    }
    monkeypatch.setattr(engine_kernels, "load_module", modules.__getitem__)
    processors = SimpleNamespace(multi_processor_count=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: processors)
    return gaps


@pytest.mark.parametrize("fp8", [False, True], ids=["bfloat16", "fp8"])
@pytest.mark.parametrize(
    "geometry",
    [Geometry(1, 37, 150, 192, "cpu"), Geometry(3, 1, 150, 192, "cpu")],
    ids=["prefill", "decode"],
)
def test_the_engines_kernels_are_called_as_ours(
    monkeypatch: pytest.MonkeyPatch, geometry: Geometry, fp8: bool
) -> None:
    """The same selection and the same attention as the reference, from the same caches."""
    torch.manual_seed(0)
    gaps = fake_engine(monkeypatch)
    monkeypatch.setattr(engine_kernels, "SLICE_BYTES", 4 * 150 * 10)  # several slices
    ours = load_ops("reference", "cpu", REAL_WIDTHS, fp8_kv=fp8)
    engine = load_ops("engine", "cpu", REAL_WIDTHS, fp8_kv=fp8)
    rows, slots = geometry.requests * geometry.queries, 3 * 192
    keys = ours.index_cache(slots, 128, torch.bfloat16)
    latent = ours.latent_cache(slots, 576, torch.bfloat16)
    ours.store_keys(keys, torch.arange(slots), torch.randn(slots, 128).bfloat16())
    ours.store_latent(latent, torch.arange(slots), torch.randn(slots, 576).bfloat16())
    q, gates = torch.randn(rows, 8, 128).bfloat16(), torch.randn(rows, 8)
    mine = ours.select(q, gates, keys, geometry, 16)
    theirs = engine.select(q, gates, keys, geometry, 16)
    assert min(gaps) > 1e-5, "two scores are as near as rounding: take another seed"
    assert torch.equal(mine, theirs.sort(-1).values)  # nothing is padded: all see more than 16
    heads = torch.randn(rows, 20, 576).bfloat16()
    attended = [ops.attend(heads, latent, mine, 0.05, 512) for ops in (ours, engine)]
    torch.testing.assert_close(*attended, rtol=0.01, atol=0.01)


def test_an_engine_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    with pytest.raises(BenchError, match="need deep_gemm, which cannot be loaded here"):
        load_ops("engine", "cpu", REAL_WIDTHS)


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
