"""L layers through SGLang's indexer, without a GPU: what is selected, and who scores it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.dsa import dsa_indexer

from sglang_indexcache.errors import SettingsError
from sglang_indexcache.kernels.indexer.fold import product
from sglang_indexcache.kernels.indexer.quantization import quantize_e4m3, read_pages, write_pages
from sglang_indexcache.kernels.indexer.second_stage import SecondStage
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.cuda import kernels as kernels_cuda
from sglang_indexcache.serving.cuda.backend import IndexCacheBackend
from sglang_indexcache.serving.cuda.choice import check_folding
from sglang_indexcache.serving.cuda.fold import FoldedLayers
from sglang_indexcache.serving.cuda.kernels import EngineKernels
from sglang_indexcache.serving.plan import Plan
from tests.kernels.test_second_stage import select_among
from tests.serving.cuda.test_choice import glm5, server
from tests.serving.cuda.test_kernels import (
    FORWARDS,
    HEADS,
    SLOTS,
    TOPK,
    make_backend,
    make_batch,
    make_indexer,
    one_gpu,  # noqa: F401
    page_table_of,
    select_with_ours,
)

pytestmark = pytest.mark.usefixtures("seed")
SLOPES = tuple(round(0.1 + 0.1 * head, 6) for head in range(HEADS))
BOUND = 2.0**-8
LOGITS = "sglang.srt.layers.attention.dsa.dsa_indexer.resolve_fp8_mqa_logits_fn"


def folding_plan(letters: str) -> Plan:
    """Return a plan in which layers fold; ``letters`` may end in candidates."""
    layers = letters.partition("+")[0]
    all_full, numbers = Pattern("F" * len(layers)), tuple(range(len(layers)))
    pattern, slopes = Pattern(f"{letters}@0123456789ab"), (SLOPES,) * len(layers)
    return Plan(pattern, "test", "static", all_full, numbers, "GlmMoeDsaForCausalLM", slopes=slopes)


def folding(backend: IndexCacheBackend, letters: str = "L") -> FoldedLayers:
    """Give a backend a plan in which layers fold."""
    backend.folded = FoldedLayers.of(folding_plan(letters), torch.device("cpu"))
    return backend.folded


def draw(backend: IndexCacheBackend, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw queries, weights of both signs ``[rows, H, 1]``, and keys in the pool's pages."""
    write_pages(
        backend.token_to_kv_pool.pages, torch.arange(SLOTS), *quantize_e4m3(torch.randn(SLOTS, 128))
    )
    return quantize_e4m3(torch.randn(rows, HEADS, 128))[0], torch.randn(rows, HEADS, 1)


def scores_of(
    backend: IndexCacheBackend, table: torch.Tensor, q: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return folded scores of what every row's table names, in float64, and what rounding moves."""
    values, scales = read_pages(backend.token_to_kv_pool.pages, table.flatten().long(), 128)
    keys = (values.double() * scales.double()[:, None]).view(*table.shape, 128)
    gates = weights.squeeze(-1).double() * torch.tensor(SLOPES).double()
    query = torch.einsum("thd,th->td", q.double(), gates)
    moved = torch.einsum("td,tsd->ts", query.abs(), keys.abs()) * BOUND
    return torch.einsum("td,tsd->ts", query, keys), moved


def exact_scores_of(
    backend: IndexCacheBackend, table: torch.Tensor, q: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Return what SGLang's indexer scores, in float64."""
    values, scales = read_pages(backend.token_to_kv_pool.pages, table.flatten().long(), 128)
    keys = (values.double() * scales.double()[:, None]).view(*table.shape, 128)
    products = torch.einsum("thd,tsd->ths", q.double(), keys).relu()
    return torch.einsum("ths,th->ts", products, weights.squeeze(-1).double())


@pytest.mark.parametrize("fused", [False, True], ids=["positions", "slots"])
@pytest.mark.parametrize("forward", FORWARDS)
def test_an_f_layer_selects_among_candidates(
    monkeypatch: pytest.MonkeyPatch, forward: str, fused: bool
) -> None:
    """It does where a page table holds more tokens; else SGLang selects, from its own heads."""
    mode, lengths, extend, drafted = FORWARDS[forward]
    backend = make_backend(monkeypatch, draft_tokens=drafted, fused=fused)
    backend.kernels = EngineKernels()

    def select(stage: SecondStage, batch: Any, topk: int, **form: Any) -> torch.Tensor:
        return select_among(batch, topk, stage.slopes, stage.factor, **form)

    monkeypatch.setattr(SecondStage, "__call__", select)  # Triton's kernels want a card
    batch = make_batch(backend, mode, lengths, extend)
    backend.init_forward_metadata(batch)
    rows = sum(extend)
    q, weights = draw(backend, rows + 3)
    folding(backend, "F+c2")
    metadata = backend.get_indexer_metadata(0, batch)
    if metadata.get_page_table_64().shape[1] * 64 <= 2 * TOPK:
        monkeypatch.setattr(kernels_cuda, "get_attn_backend", lambda: backend)
        call = (False, batch, 0, q, weights, metadata)
        assert kernels_cuda._ragged(lambda *given: given[4:6], make_indexer(), *call) == (
            q,
            weights,
        )
        return
    got = select_with_ours(monkeypatch, backend, batch, q, weights)
    assert got.shape == (rows + 3, TOPK)
    assert (got[rows:] == -1).all()
    visible = metadata.get_seqlens_expanded()
    table = page_table_of(backend, metadata, rows)
    folded, _ = scores_of(backend, table.clamp(0, SLOTS - 1), q[:rows], weights[:rows])
    exact = exact_scores_of(backend, table.clamp(0, SLOTS - 1), q[:rows], weights[:rows])
    for row, count in enumerate(visible.tolist()):
        candidates = folded[row, :count].topk(min(2 * TOPK, count)).indices
        best = exact[row, candidates].topk(min(TOPK, count)).indices
        wanted = candidates[best].sort().values
        wanted = table[row, wanted].long() if fused else wanted
        assert got[row][: len(wanted)].tolist() == wanted.tolist()
        assert (got[row][len(wanted) :] == -1).all()


def test_only_f_layers_that_fold_have_a_second_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = folding_plan("FLSFF+c4")
    plan = replace(plan, slopes=(*plan.slopes[:4], None))  # the last one folds badly
    layers = FoldedLayers.of(plan, torch.device("cpu"))
    table = SimpleNamespace(get_page_table_64=lambda: torch.zeros(1, 100))
    stages = [layers.second_stage(layer, table, TOPK) for layer in range(6)]
    assert [getattr(stage, "factor", None) for stage in stages] == [4, None, None, 4, None, None]
    assert [layer in layers for layer in range(6)] == [False, True, False, False, False, False]
    few = SimpleNamespace(get_page_table_64=lambda: torch.zeros(1, 4 * TOPK // 64))
    assert layers.second_stage(0, few, TOPK) is None


@pytest.mark.parametrize("forward", FORWARDS)
def test_our_kernel_selects_an_l_layer_by_its_folded_score(
    monkeypatch: pytest.MonkeyPatch, forward: str
) -> None:
    mode, lengths, extend, drafted = FORWARDS[forward]
    backend = make_backend(monkeypatch, draft_tokens=drafted, fused=False)
    batch = make_batch(backend, mode, lengths, extend)
    backend.init_forward_metadata(batch)
    rows = sum(extend)
    q, weights = draw(backend, rows + 3)
    exact = select_with_ours(monkeypatch, backend, batch, q, weights)
    folding(backend)
    selected = select_with_ours(monkeypatch, backend, batch, q, weights)
    assert selected.shape == (rows + 3, TOPK)
    assert (selected[rows:] == -1).all()
    metadata = backend.get_indexer_metadata(0, batch)
    visible = metadata.get_seqlens_expanded()
    table = page_table_of(backend, metadata, rows).clamp(0, SLOTS - 1)
    scores, moved = scores_of(backend, table, q[:rows], weights[:rows])
    for row in range(rows):
        count = int(visible[row])
        picks = selected[row][selected[row] >= 0].long()
        assert len(picks) == min(TOPK, count)
        is_picked = torch.zeros(count, dtype=torch.bool)
        is_picked[picks] = True
        if not is_picked.all():
            least = (scores[row, :count] + moved[row, :count])[is_picked].min()
            assert (scores[row, :count] - moved[row, :count])[~is_picked].max() <= least
    assert not torch.equal(selected, exact) or max(lengths) <= TOPK


def test_only_an_l_layer_is_given_folded_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = folding(make_backend(monkeypatch), "LSF")
    q, weights = quantize_e4m3(torch.randn(4, HEADS, 128))[0], torch.randn(6, HEADS, 1)
    assert [layer in layers for layer in range(3)] == [True, False, False]
    for layer in (1, 2):
        unchanged, gates = layers.heads(layer, q, weights, 8)
        assert unchanged is q
        assert gates is weights
    folded, signs = layers.heads(0, q, weights, 32)
    assert folded.shape == (4, 32, 128)
    assert signs.shape == (4, 32, 1)
    assert layers.heads(0, q, weights[:2], 8)[0][2:].float().abs().max() == 0


@pytest.mark.parametrize(("layer", "is_product"), [(0, True), (1, False)])
def test_the_product_scores_a_prefill_of_l_layers_alone(
    monkeypatch: pytest.MonkeyPatch, layer: int, is_product: bool
) -> None:
    """SGLang asks for its logits inside of what is wrapped; DeepGEMM's come everywhere else."""
    backend = make_backend(monkeypatch)
    backend.kernels = EngineKernels()
    folding(backend, "LF")
    wrapped: dict[str, Any] = {}
    monkeypatch.setattr(kernels_cuda, "around", wrapped.setdefault)
    kernels_cuda.install()
    logits = wrapped[LOGITS]
    monkeypatch.setattr(kernels_cuda, "get_attn_backend", lambda: backend)
    calls = []

    def original(_indexer: Any, *call: Any) -> str:
        calls.append((call[3].shape, call[4].shape, logits(lambda: "DeepGEMM's")))
        return "selected"

    q, weights = draw(backend, 5)
    call = (False, None, layer, q, weights, None)
    assert kernels_cuda._ragged(original, make_indexer(), *call) == "selected"
    ((queries, gates, function),) = calls
    assert queries == (5, HEADS, 128)
    assert gates == (5, HEADS, 1)
    assert (function is product) == is_product
    assert logits(lambda: "DeepGEMM's") == "DeepGEMM's", "outside"

    def fails(*_: Any) -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        kernels_cuda._ragged(fails, make_indexer(), *call)
    assert logits(lambda: "DeepGEMM's") == "DeepGEMM's", "behind a failure"


def test_sglang_asks_for_its_logits_where_we_wrap_it() -> None:
    path, _, name = LOGITS.rpartition(".")
    assert path == dsa_indexer.__name__
    assert callable(getattr(dsa_indexer, name))


def test_a_backend_of_sglangs_own_folds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft model's, whose layers have the same numbers."""
    monkeypatch.setattr(kernels_cuda, "get_attn_backend", SimpleNamespace)
    layers = kernels_cuda.folded_layers()
    assert not any(layer in layers for layer in range(100))
    assert kernels_cuda._logits_function(lambda: "DeepGEMM's") == "DeepGEMM's"


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"index_n_heads": 48}, "has 48 heads"),
        ({"index_head_dim": 64}, "64 wide"),
        ({"index_kpool": 4}, "pools its index keys"),
    ],
)
def test_what_cannot_fold_on_a_gpu(shape: dict[str, Any], message: str) -> None:
    for letters in ("FL", "FL+c2"):
        check_folding(folding_plan(letters), server(), glm5())
        with pytest.raises(SettingsError, match=message):
            check_folding(folding_plan(letters), server(), glm5(**shape))


@pytest.mark.parametrize(
    ("fields", "shape", "message"),
    [
        ({"enable_prefill_cp": True}, {}, "--enable-prefill-cp"),
        ({"dcp_size": 2}, {}, "--dcp-size"),
        ({"enable_kv_cache_sharding": True}, {}, "--enable-kv-cache-sharding"),
        ({}, {"index_init_tokens": 4}, "always selects some first"),
    ],
)
def test_where_candidates_cannot_be_chosen(
    fields: dict[str, Any], shape: dict[str, Any], message: str
) -> None:
    check_folding(folding_plan("FL"), server(**fields), glm5(**shape))
    with pytest.raises(SettingsError, match=rf"candidates \(\+cN\), which .*{message}"):
        check_folding(folding_plan("FL+c2"), server(**fields), glm5(**shape))
