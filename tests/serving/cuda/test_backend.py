"""The CUDA backend's own logic, on top of a stand-in for SGLang's kernels.

What SGLang's methods do is not tested here (that needs a GPU), only what reaches them.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend, TopkTransformMethod
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_indexcache.errors import SettingsError, StaleIndexError
from sglang_indexcache.serving import factory
from sglang_indexcache.serving.cuda import live_indexer
from sglang_indexcache.serving.cuda.backend import IndexCacheBackend, with_heads_for_flashmla
from sglang_indexcache.serving.process import ServingProcess
from tests.serving.plans import plan


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, torch.Tensor | None]]:
    """(layer, indices) that reach SGLang's attention, in order."""
    calls: list[tuple[int, torch.Tensor | None]] = []

    def attention(
        self: Any, q: Any, k: Any, v: Any, layer: Any, fb: Any, *args: Any, **kw: Any
    ) -> str:
        calls.append((layer.layer_id, kw["topk_indices"]))
        return "output"

    monkeypatch.setattr(DeepseekSparseAttnBackend, "__init__", lambda self, runner: None)
    monkeypatch.setattr(DeepseekSparseAttnBackend, "init_forward_metadata", lambda self, fb: None)
    monkeypatch.setattr(
        DeepseekSparseAttnBackend,
        "init_forward_metadata_out_graph",
        lambda self, fb, in_capture=False: None,
    )
    monkeypatch.setattr(DeepseekSparseAttnBackend, "forward_extend", attention)
    monkeypatch.setattr(DeepseekSparseAttnBackend, "forward_decode", attention)
    return calls


def runner(start_layer: int = 0, **config: Any) -> Any:
    """Return what a backend reads of SGLang's ModelRunner."""
    return SimpleNamespace(
        layer_info=SimpleNamespace(start_layer=start_layer),
        model_config=SimpleNamespace(hf_config=SimpleNamespace(**config)),
        attn_backend=None,
    )


def backend(
    text: str, mode: str = "static", process: ServingProcess | None = None
) -> IndexCacheBackend:
    """Make a backend for a runner of the whole model."""
    process = process or ServingProcess(plan(text, mode=mode))
    built = IndexCacheBackend(runner(first_k_dense_replace=1), process)
    built.use_mha = False
    return built


def overlapped(
    text: str, mode: str = "static"
) -> tuple[IndexCacheBackend, list[IndexCacheBackend]]:
    """Return the backends of whole batches and of their two parts."""
    process = ServingProcess(plan(text, mode=mode))
    primary, *parts = (backend(text, mode, process) for _ in range(3))
    for part in (primary, *parts):
        part._runner.attn_backend = SimpleNamespace(primary=primary, children=parts)
    return primary, parts


def batch(rows: tuple[int, int] | None = None, **fields: Any) -> Any:
    extend = {"forward_mode": ForwardMode.EXTEND, "rids": None, "batch_size": 1}
    return SimpleNamespace(tbo_parent_token_range=rows, tbo_padded_len=None, **extend | fields)


Q = torch.empty(100, 1)
"""Queries, of as many rows as any test has."""


def layer(number: int) -> Any:
    return SimpleNamespace(layer_id=number)


@pytest.mark.parametrize("method", ["forward_extend", "forward_decode"])
def test_shared_layers_get_indices_that_sglang_did_not_carry(
    reads: list[tuple[int, torch.Tensor | None]], method: str
) -> None:
    shared = backend("FSSF")
    shared.init_forward_metadata(batch())
    attend = getattr(shared, method)
    selected = {0: torch.tensor([[1]]), 3: torch.tensor([[2]])}
    for number in range(4):
        assert (
            attend(Q, 2, 3, layer(number), batch(), topk_indices=selected.get(number)) == "output"
        )
    assert [indices for _, indices in reads] == [
        selected[0], selected[0], selected[0], selected[3]
    ]  # fmt: skip
    assert shared.process.counters.indexer_selections == [1, 0, 0, 1]
    assert shared.process.counters.index_reuses == [0, 1, 1, 0]


def test_each_forward_starts_empty(reads: list[tuple[int, torch.Tensor | None]]) -> None:
    shared = backend("FS")
    shared.init_forward_metadata(batch())
    shared.forward_decode(Q, 2, 3, layer(0), batch(), topk_indices=torch.tensor([[1]]))
    shared.init_forward_metadata_out_graph(batch())
    with pytest.raises(StaleIndexError):
        shared.forward_decode(Q, 2, 3, layer(1), batch())
    assert len(reads) == 1
    assert shared.process.counters.index_reuses == [0, 0]  # the layer attended to nothing


def test_sub_batches_split_what_the_whole_batch_selected(
    reads: list[tuple[int, torch.Tensor | None]],
) -> None:
    """Dense layers run on the whole batch in two-batch overlap, the others on its two parts."""
    primary, parts = overlapped("FSSF")
    for each in (primary, *parts):
        each.init_forward_metadata(batch())
    selected = torch.arange(10).view(5, 2)
    primary.forward_extend(Q, 2, 3, layer(0), batch(), topk_indices=selected)
    ranges = [(0, 2), (2, 5)]
    for number in (1, 2):
        for part, rows in zip(parts, ranges, strict=True):
            part.forward_extend(Q, 2, 3, layer(number), batch(rows))
            assert reads[-1][1] is not None
            assert torch.equal(reads[-1][1], selected[slice(*rows)])
    assert primary.process.counters.forwards == 1
    assert primary.process.counters.index_reuses == [0, 2, 2, 0]  # each part for itself
    own_indices = [torch.tensor([[8]]), torch.tensor([[9]])]
    for part, rows, indices in zip(parts, ranges, own_indices, strict=True):
        part.forward_extend(Q, 2, 3, layer(3), batch(rows), topk_indices=indices)
        assert reads[-1][1] is indices


def test_a_model_without_dense_layers_is_overlapped_from_the_start(
    reads: list[tuple[int, torch.Tensor | None]],
) -> None:
    assert IndexCacheBackend(runner(), ServingProcess(plan("FS"))).first_overlapped_layer == 0


@pytest.mark.parametrize(
    ("text", "mode", "kernel", "fp8", "blackwell", "fits"),
    [
        ("FSF", "static", "flashmla_sparse", True, False, False),
        ("FSF", "static", "flashmla_sparse", False, False, True),
        ("FSF", "static", "flashmla_kv", True, True, True),
        ("FFS", "static", "flashmla_sparse", True, True, True),
        ("FSF", "static", "flashmla_auto", True, True, False),
        ("FSF", "static", "flashmla_auto", True, False, True),
        ("FSF", "static", "flashmla_auto", False, True, True),
        ("FFF", "live", "flashmla_auto", True, True, False),  # a request may name FSF
        ("FFF", "live", "flashmla_kv", True, True, True),
    ],
)
def test_overlap_refuses_offsets_that_cannot_be_cut(
    reads: list[tuple[int, torch.Tensor | None]],
    text: str,
    mode: str,
    kernel: str,
    fp8: bool,
    blackwell: bool,
    fits: bool,
) -> None:
    """SGLang's own choice for a batch of few cached tokens agrees."""
    built = backend(text, mode)
    built.dsa_prefill_impl, built.dsa_kv_cache_store_fp8 = kernel, fp8
    built.enable_auto_select_prefill_impl = kernel == "flashmla_auto"
    built._is_blackwell = lambda: blackwell
    if fits:
        factory._check_overlap(built)
    else:
        with pytest.raises(SettingsError, match="layer 1 is the first to run on sub-batches"):
            factory._check_overlap(built)
    built._is_in_breakable_cuda_graph = built._is_in_tc_piecewise_cuda_graph = lambda: False
    built._get_device_sm = lambda: 100 if blackwell else 90
    built.supports_mha_one_shot = False
    few = batch()
    few.seq_lens_cpu, few.seq_lens_sum, few.extend_num_tokens = torch.tensor([300]), 300, 300
    few.forward_mode = ForwardMode.EXTEND
    built.set_dsa_prefill_impl(few)
    is_ragged = built.get_topk_transform_method(ForwardMode.EXTEND) == TopkTransformMethod.RAGGED
    may_be_cut = text.startswith("FF") and mode == "static"
    assert fits is (may_be_cut or not is_ragged)


class FakeIndexer:
    """Counts what live mode asks of SGLang's indexer."""

    def __init__(self) -> None:
        self.keys_only = 0

    def _forward_cuda_k_only(self, *args: Any, return_indices: bool) -> None:
        assert return_indices is False
        self.keys_only += 1


@pytest.fixture
def live(
    reads: list[tuple[int, torch.Tensor | None]], monkeypatch: pytest.MonkeyPatch
) -> IndexCacheBackend:
    live_backend = backend("FS", mode="live")
    live_backend.get_indexer_metadata = lambda layer_id, fb: None  # type: ignore[method-assign]
    live_backend.init_forward_metadata(batch())
    monkeypatch.setattr(live_indexer.kernels_cuda, "get_attn_backend", lambda: live_backend)
    monkeypatch.setattr(live_indexer, "maybe_capture_indexer_topk", lambda number, indices: indices)
    return live_backend


SELECTED = torch.tensor([[7]])


def run_live(indexer: FakeIndexer, number: int, return_indices: bool = True) -> Any:
    def original(self: Any, *args: Any) -> torch.Tensor:
        return SELECTED

    return live_indexer.indexer_forward(
        original, indexer, None, None, None, batch(), number, return_indices
    )  # type: ignore[arg-type]


def test_live_shared_layer_stores_its_key_and_selects_nothing(live: IndexCacheBackend) -> None:
    indexer = FakeIndexer()
    assert run_live(indexer, 0) is SELECTED
    live.forward_extend(Q, 2, 3, layer(0), batch(), topk_indices=SELECTED)
    assert run_live(indexer, 1) is SELECTED
    assert indexer.keys_only == 1
    assert live.process.counters.index_key_writes == [0, 1]


def test_live_key_only_calls_stay_sglangs(live: IndexCacheBackend) -> None:
    indexer = FakeIndexer()
    assert run_live(indexer, 1, return_indices=False) is SELECTED
    assert indexer.keys_only == 0


def test_live_wrapper_leaves_other_backends_alone(
    live: IndexCacheBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_indexer.kernels_cuda, "get_attn_backend", lambda: SimpleNamespace())
    assert run_live(FakeIndexer(), 1) is SELECTED


@pytest.mark.parametrize(
    ("heads", "major", "padded"),
    [
        (20, 9, 64),
        (12, 9, 64),
        (96, 9, 128),
        (24, 10, 128),
        (192, 10, 256),
        (16, 9, 16),
        (64, 9, 64),
    ],
)
@pytest.mark.parametrize("with_sink", [False, True])
def test_heads_that_sglang_cannot_pad_are_padded_for_flashmla(
    heads: int, major: int, padded: int, with_sink: bool
) -> None:
    """Numbers that divide the block are left to SGLang, whose own padding takes them."""
    sink = torch.randn(heads) if with_sink else None
    call = {"q_all": torch.randn(3, heads, 576), "attn_sink": sink, "sm_scale": 0.1}
    given = with_heads_for_flashmla(call, major)
    q, sinks = given["q_all"], given["attn_sink"]
    assert q.shape == (3, padded, 576)
    torch.testing.assert_close(q[:, :heads], call["q_all"], rtol=0, atol=0)
    assert not q[:, heads:].any()
    assert given["sm_scale"] == 0.1
    assert (sinks is None) == (sink is None)
    if sink is not None:
        torch.testing.assert_close(sinks[:heads], sink, rtol=0, atol=0)
        assert sinks.shape == (padded,)
