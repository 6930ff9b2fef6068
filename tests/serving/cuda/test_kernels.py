"""Our kernels where SGLang's would run, with the reference implementations on a CPU.

SGLang's own code makes the metadata of every forward, and its own torch (the fallbacks for cards
without DeepGEMM, its unfused top-k, its attention methods up to the kernel) says what the kernel
in that place must give. Index scores are integers, exact in every arithmetic and different for
every token, so two correct selections are equal sets.
"""

import inspect
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.kernels.ops.attention.dsa import transform_index
from sglang.kernels.ops.attention.dsv4 import topk as topk_v2
from sglang.srt.environ import envs
from sglang.srt.layers.attention import dsa_backend
from sglang.srt.layers.attention.dsa import dsa_indexer, utils
from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer
from sglang.srt.layers.attention.dsa.dsa_topk_backend import DSATopKBackend
from sglang.srt.layers.attention.dsa.dsa_topk_backend import _topk_unfused as unfused_topk
from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend, TopkTransformMethod
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_indexcache.kernels.contract import IndexerBatch
from sglang_indexcache.kernels.dispatch import named
from sglang_indexcache.kernels.indexer.quantization import write_pages
from sglang_indexcache.kernels.routes import Operation, Routes, Shape
from sglang_indexcache.kernels.sparse_mla.layout import dequantize_latent, quantize_latent
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.cuda import kernels as kernels_cuda
from sglang_indexcache.serving.cuda.backend import IndexCacheBackend
from sglang_indexcache.serving.cuda.choice import Route
from sglang_indexcache.serving.cuda.kernels import EngineKernels, KeptLists
from sglang_indexcache.serving.cuda.second_topk import SecondTopk
from sglang_indexcache.serving.plan import Plan
from sglang_indexcache.serving.process import ServingProcess
from tests.serving.cuda.test_backend import runner

pytestmark = pytest.mark.usefixtures("seed")

TOPK, HEADS, PAGES, CONTEXT = 96, 8, 24, 640
SLOTS = PAGES * 64
SELECT, ATTEND = (named("reference").load(op) for op in ("select", "sparse_mla"))
REFERENCE = EngineKernels(SELECT, SELECT, ATTEND, ATTEND)


# -- SGLang's own objects, without a GPU -------------------------------------------------------


@pytest.fixture(autouse=True)
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer what SGLang asks of its process: no parallelism. Put its Triton kernel in torch."""
    alone = SimpleNamespace(attn_cp_size=1, attn_tp_size=1, cp_strategy="none")
    monkeypatch.setattr(utils, "get_parallel", lambda: alone)

    def expand(extend: torch.Tensor, lengths: torch.Tensor, total: int, _max: int) -> torch.Tensor:
        ends = zip(extend.tolist(), lengths.tolist(), strict=True)
        rows = torch.cat([torch.arange(n - e + 1, n + 1) for e, n in ends]).to(torch.int32)
        assert len(rows) == total
        return rows

    monkeypatch.setattr(dsa_backend, "seqlens_expand_triton", expand)


@dataclass
class Pool:
    """The part of DSATokenToKVPool that a forward reads."""

    pages: torch.Tensor
    latent: torch.Tensor
    index_page_size: int = 64
    dtype: torch.dtype = torch.bfloat16
    size: int = SLOTS
    page_size: int = 64
    stored: int = 0

    def get_index_k_with_scale_buffer(self, layer_id: int) -> torch.Tensor:
        return self.pages

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.latent

    def set_mla_kv_buffer(self, *_args: Any) -> None:
        self.stored += 1


def make_backend(
    monkeypatch: pytest.MonkeyPatch,
    *,
    prefill: str = "flashmla_sparse",
    decode: str = "fa3",
    fp8: bool = False,
    draft_tokens: int = 0,
    fused: bool = True,
    pattern: str = "F",
) -> IndexCacheBackend:
    """Our backend as SGLang's ``__init__`` leaves it, without what needs a GPU."""
    monkeypatch.setattr(DeepseekSparseAttnBackend, "__init__", lambda self, runner: None)
    layers = tuple(range(len(pattern)))
    exact = Pattern(pattern)
    plan = Plan(exact, "test", "static", exact, layers, "GlmMoeDsaForCausalLM")
    backend = IndexCacheBackend(runner(), ServingProcess(plan))
    table = torch.randint(0, SLOTS, (8, CONTEXT), dtype=torch.int32)  # unused entries: anything
    latent = torch.randn(SLOTS, 576).bfloat16()
    rows = quantize_latent(latent).view(torch.float8_e4m3fn) if fp8 else latent
    backend.__dict__.update(
        kernels=REFERENCE,
        token_to_kv_pool=Pool(torch.randint(0, 255, (PAGES, 8448)).byte(), rows[:, None]),
        req_to_token_pool=SimpleNamespace(req_to_token=table),
        device="cpu",
        use_mha=False,
        dsa_prefill_impl=prefill,
        dsa_decode_impl=decode,
        dsa_kv_cache_store_fp8=fp8,
        dsa_index_topk=TOPK,
        dsa_index_kpool=1,
        physical_page_size=64,
        speculative_num_draft_tokens=draft_tokens,
        use_fused_topk=fused,
        dsa_topk_backend=DSATopKBackend.TORCH,
        hisparse_coordinator=None,
        enable_auto_select_prefill_impl=False,
        supports_mha_one_shot=False,
        _kv_shard_pool=None,
        _arange_buf=torch.arange(64, dtype=torch.int32),
        _is_in_breakable_cuda_graph=lambda: False,
        _is_in_tc_piecewise_cuda_graph=lambda: False,
        _get_device_sm=lambda: 90,
        _is_blackwell=lambda: False,
    )
    return backend


def make_batch(
    backend: IndexCacheBackend, mode: ForwardMode, lengths: list[int], extend: list[int]
) -> Any:
    """A ForwardBatch of requests with ``lengths`` tokens, ``extend`` of them new; pages mixed.

    In MTP's verification SGLang counts the drafted tokens on top of ``seq_lens``.
    """
    free = torch.randperm(PAGES).tolist()
    table = backend.req_to_token_pool.req_to_token
    drafted = backend.speculative_num_draft_tokens if mode.is_target_verify() else 0
    for request, length in enumerate(lengths):
        for start in range(0, length, 64):
            end, slot = min(start + 64, length), free.pop() * 64
            table[request, start:end] = torch.arange(slot, slot + end - start)
    before = torch.tensor(lengths) - drafted
    return SimpleNamespace(
        forward_mode=mode,
        batch_size=len(lengths),
        seq_lens=before,
        seq_lens_cpu=before.clone(),
        seq_lens_sum=int(before.sum()),
        req_pool_indices=torch.arange(len(lengths)),
        extend_seq_lens=torch.tensor(extend, dtype=torch.int32),
        extend_seq_lens_cpu=list(extend),
        extend_num_tokens=sum(extend),
        extend_prefix_lens_cpu=[n - e for n, e in zip(lengths, extend, strict=True)],
        extend_prefix_lens=None,
        global_num_tokens_cpu=None,
        attn_cp_metadata=None,
        tbo_parent_token_range=None,
        out_cache_loc=None,
        get_max_chunk_capacity=lambda: 1 << 20,
    )


def make_queries(backend: IndexCacheBackend, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries, weights ``[rows, H, 1]``, and keys in the pool's pages.

    Three digits of a token's rank lie in three of its key's elements. Each row weighs them in an
    order and with a sign of its own. Scales are powers of two that keep the scores different.
    """
    rank = torch.randperm(SLOTS) + 1
    keys = torch.zeros(SLOTS, 128)
    keys[:, 0], keys[:, 1], keys[:, 2] = rank % 16, rank // 16 % 16, rank // 256
    scales = torch.tensor([1.0, 2.0**-20])[torch.randint(2, (SLOTS,))]
    write_pages(
        backend.token_to_kv_pool.pages, torch.arange(SLOTS), keys.to(torch.float8_e4m3fn), scales
    )
    q, weights = torch.zeros(rows, HEADS, 128), torch.zeros(rows, HEADS, 1)
    for row in range(rows):
        heads = torch.randperm(HEADS)[:3]
        q[row, heads, torch.arange(3)] = 1
        sign = 1 if row % 3 else -1
        weights[row, heads, 0] = sign * 16.0 ** torch.randperm(3)
    return q.to(torch.float8_e4m3fn), weights


def make_indexer() -> Any:
    indexer = SimpleNamespace(
        index_topk=TOPK,
        num_init_tokens=0,
        num_local_tokens=0,
        sm_count=1 << 20,
        paged_mqa_logits_backend=SimpleNamespace(is_cutedsl=lambda: False, is_aiter=lambda: False),
        _get_index_k_read_buffer=Indexer._get_index_k_read_buffer,
    )
    indexer._mask_init_and_local_tokens = lambda logits, *_: logits
    return indexer


def page_table_of(backend: IndexCacheBackend, metadata: Any, rows: int) -> torch.Tensor:
    """Return SGLang's page-size-1 table, a row for every query row."""
    table = metadata.attn_metadata.page_table_1
    if len(table) == rows:
        return table
    return table[metadata.get_token_to_batch_idx().long()]


def to_slots(positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Map as ``topk_transform`` means PAGED: through the page-size-1 table, -1 stays -1."""
    slots = table.gather(1, positions.clamp_min(0).long())
    return torch.where(positions < 0, positions, slots)


def as_sets(indices: torch.Tensor) -> list[set[int]]:
    return [set(row) - {-1} for row in indices.tolist()]


# -- selection ---------------------------------------------------------------------------------


@pytest.fixture
def torch_logits() -> Iterator[None]:
    """SGLang's own fallbacks without DeepGEMM."""
    utils.resolve_fp8_paged_mqa_logits_fn.cache_clear()
    with envs.SGLANG_FP8_PAGED_MQA_LOGITS_TORCH.override(True):
        yield
    utils.resolve_fp8_paged_mqa_logits_fn.cache_clear()


def positions_by_sglang(
    monkeypatch: pytest.MonkeyPatch,
    backend: IndexCacheBackend,
    batch: Any,
    q: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Return SGLang's selection before the page-table transform, ``[rows, TOPK]``."""
    metadata = replace(backend.get_indexer_metadata(0, batch), force_unfused_topk=True)
    if kernels_cuda.is_decode(batch.forward_mode):
        monkeypatch.setattr(dsa_indexer, "get_token_to_kv_pool", lambda: backend.token_to_kv_pool)
        return Indexer._get_topk_paged(make_indexer(), batch, 0, q, weights, metadata)
    # The rest of _get_topk_ragged gathers keys with a Triton kernel and chunks the logits.
    logits, starts = logits_by_sglang(backend, batch, q, weights)
    return metadata.topk_transform(logits, TOPK, ks=starts)


def logits_by_sglang(
    backend: IndexCacheBackend, batch: Any, q: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a prefill's logits over the keys of all requests, and where each row's begin."""
    metadata = backend.get_indexer_metadata(0, batch)
    attention = metadata.attn_metadata
    table = torch.cat(
        [
            attention.page_table_1[i, :n]
            for i, n in enumerate(metadata.get_indexer_seq_len_cpu().tolist())
        ]
    ).long()
    pages = backend.token_to_kv_pool.pages
    keys = pages[:, : 64 * 128].unflatten(1, (64, 128))[table // 64, table % 64]
    scales = pages[:, 64 * 128 :].view(torch.float32)[table // 64, table % 64]
    starts, ends = metadata.get_indexer_kvcache_range()
    rows = len(starts)
    logits = utils._fp8_mqa_logits_torch(
        q[:rows],
        (keys.view(torch.float8_e4m3fn), scales),
        weights[:rows].squeeze(-1),
        starts,
        ends,
    )
    return logits, starts


def select_with_ours(
    monkeypatch: pytest.MonkeyPatch,
    backend: IndexCacheBackend,
    batch: Any,
    q: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Select through the hooks, as SGLang's indexer calls them."""

    def original(*_args: Any) -> torch.Tensor:
        raise AssertionError("SGLang's kernel would run")

    monkeypatch.setattr(kernels_cuda, "get_attn_backend", lambda: backend)
    metadata = backend.get_indexer_metadata(0, batch)
    if kernels_cuda.is_decode(batch.forward_mode):
        return kernels_cuda._paged(original, make_indexer(), batch, 0, q, weights, metadata)
    return kernels_cuda.ragged(original, make_indexer(), False, batch, 0, q, weights, metadata)


FORWARDS: dict[str, tuple[ForwardMode, list[int], list[int], int]] = {
    # mode, lengths, new tokens of each, drafted tokens
    "first prefill": (ForwardMode.EXTEND, [130, 5, 64, 97], [130, 5, 64, 97], 0),
    "chunked prefill": (ForwardMode.EXTEND, [400, 97, 201], [30, 97, 1], 0),
    "mixed": (ForwardMode.MIXED, [150, 300, 64], [150, 1, 1], 0),
    "decode": (ForwardMode.DECODE, [1, 96, 97, 500, 64], [1] * 5, 0),
    "verify 2": (ForwardMode.TARGET_VERIFY, [97, 300, 66], [2] * 3, 2),
    "verify 4": (ForwardMode.TARGET_VERIFY, [97, 300, 130], [4] * 3, 4),
    "verify 6": (ForwardMode.TARGET_VERIFY, [97, 300], [6] * 2, 6),
    "verify 9": (ForwardMode.TARGET_VERIFY, [97, 300], [9] * 2, 9),
    "draft extend": (ForwardMode.DRAFT_EXTEND_V2, [97, 300], [3] * 2, 3),
}


@pytest.mark.parametrize("padding", [0, 3], ids=["", "padded"])
@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.parametrize("form", ["slots", "positions", "offsets"])
def test_selection_is_what_sglangs_indexer_means(
    monkeypatch: pytest.MonkeyPatch, torch_logits: None, forward: str, form: str, padding: int
) -> None:
    """It is in prefill, decode and MTP, with dp_attention's added rows, in each form of indices."""
    mode, lengths, extend, drafted = FORWARDS[forward]
    backend = make_backend(
        monkeypatch, draft_tokens=drafted, fp8=form == "offsets", fused=form != "positions"
    )
    batch = make_batch(backend, mode, lengths, extend)
    backend.init_forward_metadata(batch)
    metadata = backend.get_indexer_metadata(0, batch)
    rows = sum(extend)
    q, weights = make_queries(backend, rows + padding)
    expected = positions_by_sglang(monkeypatch, backend, batch, q, weights)[:rows]
    selected = select_with_ours(monkeypatch, backend, batch, q, weights)

    assert selected.shape == (rows + padding, TOPK)
    assert selected.dtype == torch.int32
    assert (selected[rows:] == -1).all()
    selected = selected[:rows]
    visible = metadata.get_seqlens_expanded()
    assert ((selected >= 0).sum(1) == visible.clamp(max=TOPK)).all()
    ragged = form == "offsets" and mode == ForwardMode.EXTEND
    assert (metadata.topk_transform_method == TopkTransformMethod.RAGGED) == ragged
    if form == "positions":
        assert as_sets(selected) == as_sets(expected)
        relative = selected
    elif ragged:
        offsets = metadata.attn_metadata.topk_indices_offset[:, None]
        relative = torch.where(selected < 0, selected, selected - offsets)
        assert as_sets(relative) == as_sets(expected)
    else:
        table = page_table_of(backend, metadata, rows)
        assert as_sets(selected) == as_sets(to_slots(expected, table))
        inverse = {(r, s): p for r, row in enumerate(table.tolist()) for p, s in enumerate(row)
                   if p < visible[r]}  # fmt: skip
        relative = torch.tensor(
            [
                [inverse[r, s] if s >= 0 else -1 for s in row]
                for r, row in enumerate(selected.tolist())
            ]
        )
    # In order of position, and padded at the end only: what SGLang's kernels rely on.
    order = torch.where(relative < 0, CONTEXT, relative)
    assert (order.diff(dim=1) >= 0).all()


class Default:
    """SGLang's default top-k, which only counts what it is left with."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def topk_transform(self, logits: torch.Tensor, topk: int, **_: Any) -> torch.Tensor:
        self.rows.append(len(logits))
        return torch.full((len(logits), topk), -1, dtype=torch.int32)


def ragged_v2(
    logits: torch.Tensor,
    lengths: torch.Tensor,
    *,
    out_offsets: torch.Tensor,
    out_indices: torch.Tensor,
    row_starts: torch.Tensor,
) -> None:
    out_indices.copy_(unfused_topk(logits, lengths, out_indices.shape[1], row_starts))
    out_indices += out_offsets[:, None]


def lookup(
    page_table: torch.Tensor,
    topk_indices: torch.Tensor,
    extend_lens_cpu: list[int],
    cu_seqlens_q: torch.Tensor,
) -> torch.Tensor:
    """SGLang's ``transform_index_page_table_prefill``, a Triton kernel."""
    assert len(topk_indices) == sum(extend_lens_cpu) == cu_seqlens_q[-1]
    assert cu_seqlens_q.dtype == torch.int32
    request = torch.repeat_interleave(torch.arange(len(page_table)), cu_seqlens_q.diff())
    return to_slots(topk_indices, page_table[request])


@pytest.mark.parametrize("at_once", [7, 1000], ids=["in parts", "whole"])
@pytest.mark.parametrize("lengths", [[400, 97, 201], [500]], ids=["three requests", "one"])
def test_the_second_topk_selects_what_sglangs_indexer_means(
    monkeypatch: pytest.MonkeyPatch, torch_logits: None, lengths: list[int], at_once: int
) -> None:
    """It gives slots, for all rows at once and for parts of one request's; parts of several stay
    with SGLang's default, as their rows' requests are known on the device only."""
    monkeypatch.setattr(topk_v2, "topk_transform_ragged_v2", ragged_v2)
    monkeypatch.setattr(transform_index, "transform_index_page_table_prefill", lookup)
    backend = make_backend(monkeypatch)
    batch = make_batch(backend, ForwardMode.EXTEND, lengths, [min(n, 30) for n in lengths])
    backend.init_forward_metadata(batch)
    q, weights = make_queries(backend, sum(batch.extend_seq_lens_cpu))
    expected = positions_by_sglang(monkeypatch, backend, batch, q, weights)
    logits, starts = logits_by_sglang(backend, batch, q, weights)
    default = Default()
    metadata = replace(backend.get_indexer_metadata(0, batch), topk_backend=SecondTopk(default))
    rows, parts = len(logits), []
    for first in range(0, rows, at_once):
        part = slice(first, first + at_once)
        one_each = torch.ones(len(starts[part]), dtype=torch.int32)
        how = {
            "cu_seqlens_q": one_each,
            "ke_offset": metadata.get_seqlens_expanded()[part],
            "batch_idx_list": metadata.get_token_to_batch_idx()[part],
        }
        more = how if at_once < rows else {}
        parts.append(metadata.topk_transform(logits[part], TOPK, ks=starts[part], **more))
    table = page_table_of(backend, metadata, rows)
    if len(parts) > 1 and len(lengths) > 1:
        assert sum(default.rows) == rows
        return
    assert default.rows == []
    assert as_sets(torch.cat(parts)) == as_sets(to_slots(expected, table))


class NothingIsRead(TorchDispatchMode):
    """Fails where a value of a tensor that would lie on the card comes to the host."""

    def __init__(self, on_host: torch.Tensor) -> None:
        super().__init__()
        self.on_host = on_host.untyped_storage().data_ptr()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            assert args[0].untyped_storage().data_ptr() == self.on_host, "it waits for the card"
        return func(*args, **(kwargs or {}))


PREFILL_8, DECODE_8 = Operation("select-prefill", HEADS), Operation("select-decode", HEADS)


def timed(operation: Operation, rows: int, tokens: int, **times: float) -> Shape:
    named = {"engine": 10.0} | {name.replace("_", " "): time for name, time in times.items()}
    return Shape(operation, rows, tokens, 0, tuple(named.items()))


AUTO = Routes(
    "a card",
    (
        *(timed(PREFILL_8, rows, 64, cuda=20.0, sglang_v2=9.0) for rows in (2, 400)),
        *(timed(PREFILL_8, rows, 300, cuda=5.0, sglang_v2=9.0) for rows in (2, 400)),
        *(timed(PREFILL_8, rows, 600, cuda=5.0, sglang_v2=9.0) for rows in (2, 400)),
        *(timed(DECODE_8, rows, 300, cuda=5.0 * rows) for rows in (1, 4)),
    ),
)


@pytest.mark.parametrize(
    ("mode", "lengths", "extend", "name"),
    [
        (ForwardMode.EXTEND, [300, 500], [30, 9], "cuda"),
        (ForwardMode.EXTEND, [97, 500], [30, 9], "sglang v2"),
        (ForwardMode.EXTEND, [63, 500], [30, 9], "engine"),
        (ForwardMode.EXTEND, [300], [1], "engine"),
        (ForwardMode.DECODE, [300], [1], "cuda"),
        (ForwardMode.DECODE, [300, 500], [1, 1], "engine"),
    ],
)
def test_each_call_gets_what_was_measured_for_its_rows_and_tokens(
    monkeypatch: pytest.MonkeyPatch,
    mode: ForwardMode,
    lengths: list[int],
    extend: list[int],
    name: str,
) -> None:
    """And the host waits for nothing while it chooses."""
    backend = attending_backend(monkeypatch)
    batch = make_batch(backend, mode, lengths, extend)
    backend.init_forward_metadata(batch)
    backend.kernels = EngineKernels(
        SELECT, SELECT, measured={"select-prefill": AUTO, "select-decode": AUTO}
    )
    metadata = backend.get_indexer_metadata(0, batch)
    choose = {
        ForwardMode.EXTEND: kernels_cuda._prefill_kernels,
        ForwardMode.DECODE: kernels_cuda._decode_kernels,
    }[mode]
    q, _ = make_queries(backend, sum(extend))
    with NothingIsRead(metadata.get_indexer_seq_len_cpu()):
        assert choose(backend.kernels, q, metadata) == name
    [(said, count)] = backend.kernels.taken.items()
    assert count == 1
    assert f": {name}, " in said


def test_lists_of_offsets_are_left_to_sglangs_faster_topk(monkeypatch: pytest.MonkeyPatch) -> None:
    """There it is the default, beside which the record timed nothing."""
    backend = attending_backend(monkeypatch, fp8=True)
    batch = make_batch(backend, ForwardMode.EXTEND, [300, 500], [30, 9])
    backend.init_forward_metadata(batch)
    kernels = EngineKernels(SELECT, measured={"select-prefill": AUTO})
    metadata = backend.get_indexer_metadata(0, batch)
    assert metadata.topk_transform_method == TopkTransformMethod.RAGGED
    q, _ = make_queries(backend, 39)
    assert kernels_cuda._prefill_kernels(kernels, q, metadata) == "engine"


def test_offsets_point_at_the_gathered_rows(
    monkeypatch: pytest.MonkeyPatch, torch_logits: None
) -> None:
    """The offsets of RAGGED are the slots of PAGED through SGLang's flattened table."""
    backend = make_backend(monkeypatch, fp8=True)
    batch = make_batch(backend, ForwardMode.EXTEND, [400, 97, 201], [30, 97, 1])
    backend.init_forward_metadata(batch)
    q, weights = make_queries(backend, 128)
    flattened = backend.forward_metadata.page_table_1_flattened
    offsets = select_with_ours(monkeypatch, backend, batch, q, weights)
    backend.dsa_prefill_impl = "flashmla_kv"
    slots = select_with_ours(monkeypatch, backend, batch, q, weights)
    gathered = flattened[offsets.clamp_min(0).long()]
    assert torch.equal(torch.where(offsets < 0, -1, gathered), slots)


def test_a_piecewise_graph_keeps_its_buffer(
    monkeypatch: pytest.MonkeyPatch, torch_logits: None
) -> None:
    """SGLang passes the buffer that the captured graph reads, longer than the rows."""
    backend = make_backend(monkeypatch)
    batch = make_batch(backend, ForwardMode.EXTEND, [130, 5], [130, 5])
    backend.init_forward_metadata(batch)
    q, weights = make_queries(backend, 135)
    buffer = torch.full((160, TOPK), -1, dtype=torch.int32)
    metadata = backend.get_indexer_metadata(0, batch)
    monkeypatch.setattr(kernels_cuda, "get_attn_backend", lambda: backend)
    result = kernels_cuda.ragged(
        None, make_indexer(), False, batch, 0, q, torch.cat([weights, weights]), metadata, buffer
    )  # type: ignore[arg-type]
    assert result is buffer
    assert torch.equal(buffer[:135], select_with_ours(monkeypatch, backend, batch, q, weights))
    assert (buffer[135:] == -1).all()


@pytest.mark.parametrize("drafted", [0, 3], ids=["decode", "verify"])
def test_a_replayed_graph_reads_the_new_lengths_and_pages(
    monkeypatch: pytest.MonkeyPatch, torch_logits: None, drafted: int
) -> None:
    """A graph replays the kernel on the tensors of its capture, whose metadata SGLang overwrites.

    What the kernel was given then, called again now, must select for the requests of now.
    """
    mode = ForwardMode.TARGET_VERIFY if drafted else ForwardMode.DECODE
    lengths, per_request = [97, 500, 66], drafted or 1
    rows = len(lengths) * per_request
    backend = make_backend(monkeypatch, draft_tokens=drafted)
    backend.__dict__.update(
        experimental_kpool_metadata_fusion=False,
        dsa_drop_wide_page_table=False,  # that one is filled by a Triton kernel
        req_to_token=backend.req_to_token_pool.req_to_token,
        decode_cuda_graph_metadata={
            "page_table": torch.zeros(rows, CONTEXT, dtype=torch.int32),
            "cu_seqlens_q": torch.arange(rows + 1, dtype=torch.int32),
        },
    )

    def begin(batch: Any) -> None:
        backend._apply_cuda_graph_metadata(
            batch.batch_size,
            batch.req_pool_indices,
            batch.seq_lens,
            batch.seq_lens_cpu,
            batch.forward_mode,
            None,
        )

    captured: list[Any] = []

    def kernel(*args: Any, **kwargs: Any) -> torch.Tensor:
        captured.append((args, kwargs))
        return SELECT(*args, **kwargs)

    backend.kernels = replace(REFERENCE, select_decode=kernel)
    extend = [per_request] * len(lengths)
    shortest = make_batch(backend, mode, [1 + drafted] * len(lengths), extend)
    q, weights = make_queries(backend, rows)
    begin(shortest)
    select_with_ours(monkeypatch, backend, shortest, q, weights)

    batch = make_batch(backend, mode, lengths, extend)
    begin(batch)
    backend.init_forward_metadata(batch)  # the same forward without a graph
    expected = positions_by_sglang(monkeypatch, backend, batch, q, weights)
    metadata = backend.get_indexer_metadata(0, batch)
    args, kwargs = captured[0]
    selected = SELECT(*args, **kwargs).view(rows, TOPK)
    table = page_table_of(backend, metadata, rows)
    assert as_sets(selected) == as_sets(to_slots(expected, table))


@pytest.mark.parametrize(("drafted", "groups"), [(1, 3), (4, 3), (6, 3), (9, 27)])
def test_rows_of_a_request_share_one_reading_of_its_keys(
    monkeypatch: pytest.MonkeyPatch, drafted: int, groups: int
) -> None:
    mode = ForwardMode.TARGET_VERIFY
    backend = make_backend(monkeypatch, draft_tokens=drafted)
    batch = make_batch(backend, mode, [97, 300, 66], [drafted] * 3)
    backend.init_forward_metadata(batch)
    q, weights = make_queries(backend, 3 * drafted)
    readings: list[Any] = []

    def kernel(batch: IndexerBatch, *args: Any, **kwargs: Any) -> torch.Tensor:
        assert batch.query_starts is None
        readings.append((len(batch.q), len(batch.block_table), batch.rows_per_request))
        return SELECT(batch, *args, **kwargs)

    backend.kernels = replace(REFERENCE, select_decode=kernel)
    select_with_ours(monkeypatch, backend, batch, q, weights)
    assert readings == [(3 * drafted, groups, 3 * drafted // groups)]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"indexer_logical_page_table": torch.zeros(1, 1)}, "page tables of their own"),
        ({"page_size": 32}, "pages have 32 tokens"),
        ({"dsa_seqlens_expanded": torch.ones(9, dtype=torch.int32)}, "135 query rows have 9"),
        ({"real_page_table": torch.zeros(7, 3, dtype=torch.int32)}, "has 7 rows, not 2"),
    ],
)
def test_metadata_in_another_form_is_left_to_sglang(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    changes: dict[str, Any],
    says: str,
) -> None:
    """And the log says so, once."""
    kernels_cuda._say_once.cache_clear()
    backend = make_backend(monkeypatch)
    batch = make_batch(backend, ForwardMode.EXTEND, [130, 5], [130, 5])
    backend.init_forward_metadata(batch)
    metadata = backend.get_indexer_metadata(0, batch)
    metadata = replace(metadata, attn_metadata=replace(metadata.attn_metadata, **changes))
    monkeypatch.setattr(kernels_cuda, "get_attn_backend", lambda: backend)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            call = (make_indexer(), True, batch, 3, "q", "weights", metadata, "result")
            assert kernels_cuda.ragged(lambda *args: args, *call) == call  # type: ignore
    assert [says in record.message for record in caplog.records] == [True]


def test_other_backends_keep_sglangs_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft models and servers without the flag run the same, wrapped, indexer class."""
    hybrid = SimpleNamespace(full_attn_backend=SimpleNamespace(kernels=REFERENCE))
    for backend, expected in (
        (SimpleNamespace(), EngineKernels()),
        (SimpleNamespace(kernels="a linear attention's"), EngineKernels()),
        (SimpleNamespace(kernels=EngineKernels()), EngineKernels()),
        (hybrid, REFERENCE),
    ):
        monkeypatch.setattr(kernels_cuda, "get_attn_backend", lambda b=backend: b)
        assert kernels_cuda.current() == expected
    monkeypatch.setattr(kernels_cuda, "get_attn_backend", SimpleNamespace)
    call = (make_indexer(), "batch", 3, "q", "weights", "metadata")
    assert kernels_cuda._paged(lambda *args: args, *call) == call  # type: ignore[arg-type]


# -- sparse attention --------------------------------------------------------------------------

LAYER: Any = SimpleNamespace(
    layer_id=0,
    is_cross_attention=False,
    tp_q_head_num=5,
    head_dim=576,
    v_head_dim=512,
    scaling=0.07,
    logit_cap=0.0,
)


def exact_attention(
    q: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """Softmax attention of every query over its rows, in float64."""
    out = torch.zeros(*q.shape[:2], 512, dtype=torch.float64)
    for t, list_of_row in enumerate(slots):
        latents = rows[list_of_row[list_of_row >= 0].long()].double()
        scores = q[t].double() @ latents.T * LAYER.scaling
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None]], dim=1)
            latents = torch.cat([latents, torch.zeros(1, 576, dtype=torch.float64)])
        if scores.shape[1]:
            out[t] = scores.softmax(-1) @ latents[:, :512]
    return out


def random_slots(rows: int, limit: int = SLOTS) -> torch.Tensor:
    slots = torch.stack([torch.randperm(limit)[:TOPK] for _ in range(rows)]).to(torch.int32)
    for row in range(rows):
        slots[row, TOPK - 7 * row :] = -1
    return slots


def run_attention(
    backend: IndexCacheBackend, batch: Any, q: torch.Tensor, slots: torch.Tensor, **kw: Any
) -> torch.Tensor:
    """SGLang's forward_extend or forward_decode, ours at its end."""
    backend.init_forward_metadata(batch)
    decode = batch.forward_mode.is_decode_or_idle()
    forward = backend.forward_decode if decode else backend.forward_extend
    k = kw.pop("k", torch.zeros(len(q), 1, 512))
    parts = {"q_rope": q[..., 512:], "k_rope": kw.pop("k_rope", torch.zeros(len(q), 1, 64))}
    return forward(q[..., :512].contiguous(), k, k, LAYER, batch, topk_indices=slots, **parts, **kw)


def attending_backend(monkeypatch: pytest.MonkeyPatch, **how: Any) -> IndexCacheBackend:
    """A backend whose selection is given: what SGLang prepares for its own kernels is left out."""
    backend = make_backend(monkeypatch, **how)
    backend.dsa_topk_backend = DSATopKBackend.SGL_KERNEL
    backend.device_sm_major = 9
    for name in ("_compute_flashmla_metadata", "_build_topk_v2_plan"):
        monkeypatch.setattr(backend, name, lambda *_, **__: None)
    return backend


ATTENTIONS = [
    (ForwardMode.DECODE, impl, fp8)
    for impl in ("fa3", "flashmla_sparse", "flashmla_kv")
    for fp8 in (False, True)
] + [
    (mode, impl, fp8)
    for mode in (ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY)
    for impl, fp8 in (
        ("fa3", False),
        ("flashmla_sparse", False),
        ("flashmla_kv", False),
        ("flashmla_kv", True),
    )
]


@pytest.mark.parametrize(("mode", "impl", "fp8"), ATTENTIONS)
def test_attention_over_the_pool(
    monkeypatch: pytest.MonkeyPatch, mode: ForwardMode, impl: str, fp8: bool
) -> None:
    backend = attending_backend(monkeypatch, prefill=impl, decode=impl, fp8=fp8, draft_tokens=2)
    extend = [1, 1, 1, 1] if mode == ForwardMode.DECODE else [2, 2]
    batch = make_batch(backend, mode, [130] * len(extend), extend)
    q = torch.randn(4, 5, 576).bfloat16()
    slots = random_slots(3)  # one row fewer than q: SGLang adds the row that was padded
    pool = backend.token_to_kv_pool
    rows = pool.latent[:, 0]
    rows = dequantize_latent(rows.view(torch.uint8)) if fp8 else rows
    out = run_attention(backend, batch, q, slots)
    padded = torch.cat([slots, torch.full((1, TOPK), -1, dtype=torch.int32)])
    torch.testing.assert_close(
        out.double(), exact_attention(q, rows, padded), rtol=0.01, atol=0.005
    )
    assert pool.stored == 1


def visible_rows(lengths: Sequence[int], extend: Sequence[int]) -> torch.Tensor:
    """Return how many tokens each new row sees."""
    ends = zip(extend, lengths, strict=True)
    return torch.cat([torch.arange(length - new + 1, length + 1) for new, length in ends])


@pytest.mark.parametrize("prefix", [True, False])
def test_attention_over_gathered_rows(monkeypatch: pytest.MonkeyPatch, prefix: bool) -> None:
    """SGLang hands over bfloat16 rows of this batch only for RAGGED, and offsets into them."""
    backend = attending_backend(monkeypatch, fp8=True)
    batch = make_batch(backend, ForwardMode.EXTEND, [130, 90], [2, 1] if prefix else [130, 90])
    tokens = sum(batch.extend_seq_lens_cpu)
    q, fresh = torch.randn(tokens, 5, 576).bfloat16(), torch.randn(tokens, 1, 576).bfloat16()
    monkeypatch.setattr(dsa_backend, "_cat", torch.cat)
    pool = dequantize_latent(backend.token_to_kv_pool.latent[:, 0].view(torch.uint8))
    monkeypatch.setattr(
        dsa_backend,
        "dequantize_k_cache_paged_dsa",
        lambda _cache, table: pool[table.long()][:, None],
    )
    slots = random_slots(3, limit=220).repeat(tokens // 3 + 1, 1)[:tokens].contiguous()
    # No row lists more than it sees: SGLang says so, and ours looks no further.
    slots[torch.arange(TOPK) >= visible_rows([130, 90], batch.extend_seq_lens_cpu)[:, None]] = -1
    out = run_attention(
        backend, batch, q, slots, k=fresh[..., :512].contiguous(), k_rope=fresh[..., 512:]
    )
    flattened = backend.forward_metadata.page_table_1_flattened
    rows = pool[flattened.long()] if prefix else fresh[:, 0]
    assert len(rows) == 220
    torch.testing.assert_close(out.double(), exact_attention(q, rows, slots), rtol=0.01, atol=0.005)


@pytest.mark.parametrize("impl", ["fa3", "flashmla_sparse", "flashmla_kv"])
@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.DECODE])
def test_layers_that_share_a_selection_share_what_attention_derives_from_it(
    monkeypatch: pytest.MonkeyPatch, impl: str, mode: ForwardMode
) -> None:
    """And no other does, even where SGLang selects into the same memory, as passes of a capture."""
    backend = attending_backend(monkeypatch, prefill=impl, decode=impl, pattern="FSSFS")
    users: list[int] = []

    def kernel(*_args: Any, kept: dict[object, Any], **_kw: Any) -> Any:
        users.append(kept.setdefault("first used by", len(users)))
        return None, None

    backend.kernels = EngineKernels(sparse_mla_prefill=kernel, sparse_mla_decode=kernel)
    decode = mode == ForwardMode.DECODE
    batch = make_batch(backend, mode, [130] * 4, [1] * 4)
    backend.init_forward_metadata(batch)
    forward = backend.forward_decode if decode else backend.forward_extend
    q, k, slots = torch.randn(4, 5, 576).bfloat16(), torch.zeros(4, 1, 512), random_slots(4)
    parts = {"q_rope": q[..., 512:], "k_rope": torch.zeros(4, 1, 64)}
    for _ in range(2):
        for number in range(5):
            layer = SimpleNamespace(**{**vars(LAYER), "layer_id": number})
            query = q[..., :512].contiguous()
            forward(query, k, k, layer, batch, topk_indices=slots, **parts)
    assert users == [0, 0, 0, 3, 3, 5, 5, 5, 8, 8]


def test_kept_lists_do_not_keep_the_selection() -> None:
    """A chunk's selection is 64 MB on a GPU, and the engine's to free."""
    lists, slots = KeptLists(), random_slots(4)
    freed = weakref.ref(slots)
    lists.of(slots, 1)["packed"] = 1
    assert lists.of(slots, 1) == {"packed": 1}
    del slots
    assert freed() is None
    assert lists.of(random_slots(4), 1) == {}


def test_attention_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = attending_backend(monkeypatch, decode="flashmla_sparse")
    batch = make_batch(backend, ForwardMode.DECODE, [130] * 3, [1] * 3)
    q, slots = torch.randn(3, 5, 576).bfloat16(), random_slots(3)
    sinks = torch.randn(5).bfloat16()
    out = run_attention(backend, batch, q, slots, attn_sink=sinks)
    expected = exact_attention(q, backend.token_to_kv_pool.latent[:, 0], slots, sinks)
    torch.testing.assert_close(out.double(), expected, rtol=0.01, atol=0.005)


@pytest.mark.parametrize("impl", ["fa3", "flashmla_sparse", "flashmla_kv"])
def test_attention_that_is_not_routed_stays_sglangs(
    monkeypatch: pytest.MonkeyPatch, impl: str
) -> None:
    """Each phase is routed by itself: prefill and verification are ours and SGLang's in turn."""
    backend = attending_backend(monkeypatch, prefill=impl, decode=impl, draft_tokens=2)
    theirs, mine = torch.zeros(4, 64, 512), torch.ones(4, 5, 512)
    monkeypatch.setattr(DeepseekSparseAttnBackend, f"_forward_{impl}", lambda self, **_: theirs)
    ours: Callable[..., Any] = lambda *_args, **_kw: (mine, None)  # noqa: E731
    q, slots = torch.randn(4, 5, 576).bfloat16(), random_slots(4)
    for kernels, expected in (
        (EngineKernels(sparse_mla_prefill=ours), [True, False]),
        (EngineKernels(sparse_mla_decode=ours), [False, True]),
    ):
        backend.kernels = kernels
        are_ours = []
        for mode in (ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY):
            batch = make_batch(backend, mode, [130, 130], [2, 2])
            are_ours.append(bool(run_attention(backend, batch, q, slots).all()))
        assert are_ours == expected


# -- what a worker loads -----------------------------------------------------------------------


def test_a_worker_loads_what_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_indexcache.kernels.indexer import cuda as indexer
    from sglang_indexcache.kernels.indexer import reference as indexer_reference
    from sglang_indexcache.kernels.sparse_mla import cuda as sparse_mla

    libraries: list[str] = []
    for module in (indexer, sparse_mla):
        monkeypatch.setattr(module, "library", libraries.append)
    routes = (
        Route("select", "prefill", "cuda", "opted in"),
        Route("select", "decode", "reference", "opted in"),
        Route("sparse_mla", "prefill", None, "it stands in for others"),
        Route("sparse_mla", "decode", "cuda", "opted in"),
    )
    kernels = EngineKernels.load(routes)
    assert libraries == ["indexer", "topk", "sparse_mla"]
    assert kernels.select_prefill is indexer.select
    assert kernels.select_decode is indexer_reference.select
    assert kernels.sparse_mla_prefill is None
    assert kernels.sparse_mla_decode is sparse_mla.sparse_mla
    assert kernels.selects


# -- what we rely on in SGLang's source --------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (kernels_cuda.ragged, Indexer._get_topk_ragged),
        (kernels_cuda._paged, Indexer._get_topk_paged),
    ],
)
def test_hooks_take_what_sglang_passes(ours: Any, theirs: Any) -> None:
    """SGLang passes these by position."""
    assert (
        list(inspect.signature(ours).parameters)[2:]
        == list(inspect.signature(theirs).parameters)[1:]
    )


def test_a_real_hook_reaches_ours(monkeypatch: pytest.MonkeyPatch, own_hooks: None) -> None:
    """It does through SGLang's own registry, on its own class; another call wraps nothing again."""
    theirs = {name: getattr(Indexer, name) for name in ("_get_topk_ragged", "_get_topk_paged")}
    for name, method in theirs.items():
        monkeypatch.setattr(Indexer, name, method)  # restored afterwards
    kernels_cuda.install()
    ours = {name: getattr(Indexer, name) for name in theirs}
    assert all(ours[name] is not method for name, method in theirs.items())
    kernels_cuda.install()
    assert all(getattr(Indexer, name) is method for name, method in ours.items())
    backend = make_backend(monkeypatch)
    batch = make_batch(backend, ForwardMode.DECODE, [130, 97], [1, 1])
    backend.init_forward_metadata(batch)
    q, weights = make_queries(backend, 2)
    expected = select_with_ours(monkeypatch, backend, batch, q, weights)
    metadata = backend.get_indexer_metadata(0, batch)
    selected = Indexer._get_topk_paged(make_indexer(), batch, 0, q, weights, metadata)
    assert torch.equal(selected, expected)
