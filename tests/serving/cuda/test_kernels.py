"""Choices in Python around SGLang's kernels and ours, which no rehearsed server shows.

That our kernels give what SGLang's give, in every form of a forward, is the rehearsal's
(``tests/rehearsal/test_matrix_server.py``).
"""

from __future__ import annotations

import inspect
import logging
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.kernels.ops.attention.dsa import transform_index
from sglang.kernels.ops.attention.dsv4 import topk as topk_v2
from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer
from sglang.srt.layers.attention.dsa.dsa_topk_backend import TopkTransformMethod
from sglang.srt.layers.attention.dsa.dsa_topk_backend import _topk_unfused as unfused_topk
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_indexcache.errors import SettingsError
from sglang_indexcache.kernels.routes import Operation, Routes, Shape
from sglang_indexcache.serving import factory
from sglang_indexcache.serving.cuda import kernels as kernels_cuda
from sglang_indexcache.serving.cuda import row_split as row_split_cuda
from sglang_indexcache.serving.cuda.backend import with_heads_for_flashmla
from sglang_indexcache.serving.cuda.choice import Route
from sglang_indexcache.serving.cuda.kernels import EngineKernels, KeptLists
from sglang_indexcache.serving.cuda.row_split import SplitForwards
from sglang_indexcache.serving.cuda.second_topk import SecondTopk
from tests.serving.plans import plan

pytestmark = pytest.mark.usefixtures("seed")
HEADS = 8


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


@pytest.mark.parametrize(
    ("text", "mode", "is_flattened", "fits"),
    [
        ("FSF", "static", True, False),
        ("FSF", "static", False, True),
        ("FFS", "static", True, True),  # the first layer on sub-batches selects for itself
        ("FFF", "live", True, False),  # a request may name FSF
        ("FFF", "live", False, True),
    ],
)
@pytest.mark.parametrize("by", ["kernel", "each batch"])
def test_overlap_refuses_offsets_that_cannot_be_cut(
    text: str, mode: str, is_flattened: bool, fits: bool, by: str
) -> None:
    """SGLang decides by the kernel, or for each batch, which it does over FP8 on Blackwell."""
    for_each_batch = by == "each batch"
    method = TopkTransformMethod.RAGGED if is_flattened else TopkTransformMethod.PAGED
    backend: Any = SimpleNamespace(
        first_overlapped_layer=1,
        process=SimpleNamespace(plan=plan(text, mode=mode)),
        enable_auto_select_prefill_impl=for_each_batch,
        dsa_kv_cache_store_fp8=for_each_batch,
        _is_blackwell=lambda: is_flattened,
        get_topk_transform_method={ForwardMode.EXTEND: method}.get,
    )
    if fits:
        factory._check_overlap(backend)
    else:
        with pytest.raises(SettingsError, match="layer 1 is the first to run on sub-batches"):
            factory._check_overlap(backend)


# -- which kernel ------------------------------------------------------------------------------


def timed(name: str, rows: int, tokens: int, **times: float) -> Shape:
    by_kernel = {"engine": 10.0} | {kernel.replace("_", " "): t for kernel, t in times.items()}
    return Shape(Operation(name, HEADS), rows, tokens, 0, tuple(by_kernel.items()))


AUTO = Routes(
    "a card",
    (
        *(timed("select-prefill", rows, 64, cuda=20.0, sglang_v2=9.0) for rows in (2, 400)),
        *(timed("select-prefill", rows, 300, cuda=5.0, sglang_v2=9.0) for rows in (2, 400)),
        *(timed("select-prefill", rows, 600, cuda=5.0, sglang_v2=9.0) for rows in (2, 400)),
        *(timed("select-decode", rows, 300, cuda=5.0 * rows) for rows in (1, 4)),
    ),
)


def metadata_of(lengths: list[int], extend: list[int], **fields: Any) -> Any:
    """Return what a choice reads of SGLang's metadata, all of it on the host."""
    has_second = SimpleNamespace(should_use_topk_v2=lambda: True)
    return SimpleNamespace(
        **{
            "topk_backend": has_second,
            "topk_transform_method": TopkTransformMethod.PAGED,
            "force_unfused_topk": False,
            "get_indexer_seq_len_cpu": lambda: torch.tensor(lengths),
            "get_indexer_kvcache_range": lambda: (torch.zeros(sum(extend)),) * 2,
            "get_seqlens_int32": lambda: torch.tensor(lengths),
            "get_dsa_extend_len_cpu": lambda: extend,
            **fields,
        }
    )


@pytest.mark.parametrize(
    ("phase", "lengths", "extend", "fields", "name"),
    [
        ("prefill", [300, 500], [30, 9], {}, "cuda"),
        ("prefill", [97, 500], [30, 9], {}, "sglang v2"),
        ("prefill", [63, 500], [30, 9], {}, "engine"),
        ("prefill", [300], [1], {}, "engine"),
        # Lists of offsets have SGLang's faster top-k by default, beside which nothing was timed.
        (
            "prefill",
            [300, 500],
            [30, 9],
            {"topk_transform_method": TopkTransformMethod.RAGGED},
            "engine",
        ),
        ("decode", [300], [1], {}, "cuda"),
        ("decode", [300, 500], [1, 1], {}, "engine"),
    ],
)
def test_each_call_gets_what_was_measured_for_its_rows_and_tokens(
    phase: str, lengths: list[int], extend: list[int], fields: dict[str, Any], name: str
) -> None:
    choose = {"prefill": kernels_cuda._prefill_kernels, "decode": kernels_cuda._decode_kernels}
    kernels = EngineKernels(measured={"select-prefill": AUTO, "select-decode": AUTO})
    q = torch.zeros(sum(extend), HEADS, 128)
    assert choose[phase](kernels, q, metadata_of(lengths, extend, **fields)) == name
    assert [choice.split(", ")[0] for choice in kernels.taken] == (
        [] if fields else [f"select-{phase}: {name}"]
    )


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


def test_other_backends_keep_sglangs_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft models and servers without the flag run the same, wrapped, indexer class."""
    ours = EngineKernels(select_decode=lambda *_, **__: torch.empty(0))
    hybrid = SimpleNamespace(full_attn_backend=SimpleNamespace(kernels=ours))
    for backend, expected in (
        (SimpleNamespace(), EngineKernels()),
        (SimpleNamespace(kernels="a linear attention's"), EngineKernels()),
        (hybrid, ours),
    ):
        monkeypatch.setattr(kernels_cuda, "get_attn_backend", lambda b=backend: b)
        assert kernels_cuda.current() == expected


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


# -- what it is given --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"indexer_logical_page_table": torch.zeros(1, 1)}, "page tables of their own"),
        ({"page_size": 32}, "pages have 32 tokens"),
        ({"dsa_seqlens_expanded": torch.ones(9)}, "135 query rows have 9"),
        ({"real_page_table": torch.zeros(7, 3)}, "has 7 rows, not 2"),
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
    attention: dict[str, Any] = {
        "indexer_logical_page_table": None,
        "page_size": 64,
        "dsa_seqlens_expanded": torch.ones(135),
        "real_page_table": torch.zeros(2, 3),
        "cu_seqlens_q": torch.tensor([0, 130, 135]),
    }
    metadata = metadata_of([130, 5], [130, 5], attn_metadata=SimpleNamespace(**attention))
    assert kernels_cuda.mismatch(metadata, "prefill") is None
    metadata.attn_metadata = SimpleNamespace(**attention | changes)
    backend = SimpleNamespace(kernels=EngineKernels(lambda *_, **__: torch.empty(0)))
    monkeypatch.setattr(kernels_cuda, "get_attn_backend", lambda: backend)
    indexer: Any = SimpleNamespace(index_topk=96)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            call: Any = (indexer, True, "batch", 3, "q", "weights", metadata, "result")
            assert kernels_cuda.ragged(lambda *args: args, *call) == call  # type: ignore
    assert [says in record.message for record in caplog.records] == [True]


@pytest.mark.parametrize(("drafted", "groups"), [(1, 3), (4, 3), (8, 3), (9, 27)])
def test_rows_of_a_request_share_one_reading_of_its_keys(drafted: int, groups: int) -> None:
    """More than eight are requests of their own: SGLang repeats a request's pages for each row."""
    rows, pages = 3 * drafted, torch.tensor([[4, 5], [6, 7], [8, 9]], dtype=torch.int32)
    metadata = metadata_of(
        [97, 120, 66],
        [drafted] * 3,
        get_page_table_64=lambda: pages.repeat_interleave(drafted, 0),
        get_seqlens_expanded=lambda: torch.ones(rows, dtype=torch.int32),
    )
    tables = []

    def kernel(batch: Any, *_: Any, as_slots: bool, **__: Any) -> None:
        assert as_slots
        assert batch.query_starts is None
        tables.append((batch.rows_per_request, batch.block_table))

    q, weights = torch.zeros(rows, HEADS, 128), torch.zeros(rows, HEADS, 1)
    cache = torch.zeros(16, 8448, dtype=torch.uint8)
    kernels_cuda.select(kernel, "decode", q, weights, cache, metadata, 96)  # type: ignore[arg-type]
    [(of_request, table)] = tables
    assert of_request == rows // groups
    assert torch.equal(table, pages.repeat_interleave(groups // 3, 0))


@pytest.mark.parametrize("form", ["slots", "offsets", "positions"])
def test_lists_have_the_form_that_sglang_asked_for_and_lie_where_its_graph_reads(form: str) -> None:
    """Offsets are into a batch's flattened keys; rows that pad the buffer keep what they hold."""
    methods = {"slots": TopkTransformMethod.PAGED, "offsets": TopkTransformMethod.RAGGED}
    extend, offsets = [2, 1], torch.tensor([0, 0, 70], dtype=torch.int32)
    attention = SimpleNamespace(
        cu_seqlens_q=torch.tensor([0, 2, 3], dtype=torch.int32), topk_indices_offset=offsets
    )
    metadata = metadata_of(
        [70, 9],
        extend,
        attn_metadata=attention,
        topk_transform_method=methods.get(form, TopkTransformMethod.PAGED),
        force_unfused_topk=form == "positions",
        get_page_table_64=lambda: torch.zeros(2, 2, dtype=torch.int32),
        get_seqlens_expanded=lambda: torch.tensor([69, 70, 9], dtype=torch.int32),
    )
    lists = torch.tensor([[3, 5, 68], [0, 1, 69], [2, 8, -1]], dtype=torch.int32)

    def kernel(batch: Any, topk: int, *, as_slots: bool, out: torch.Tensor) -> None:
        assert (topk, as_slots) == (3, form == "slots")
        assert batch.query_starts is attention.cu_seqlens_q
        assert len(batch.q) == len(batch.weights) == len(out) == 3
        out.copy_(lists)

    q, weights = torch.zeros(5, HEADS, 128), torch.zeros(6, HEADS, 1)
    cache, buffer = torch.zeros(4, 8448, dtype=torch.uint8), torch.full((5, 3), -7).int()
    call: Any = (kernel, "prefill", q, weights, cache, metadata, 3)
    assert kernels_cuda.select(*call, buffer) is buffer
    own = lists + offsets[:, None] if form == "offsets" else lists
    assert torch.equal(buffer[:3], torch.where(lists < 0, -1, own))
    assert (buffer[3:] == -7).all()
    assert torch.equal(kernels_cuda.select(*call)[3:], torch.full((2, 3), -1).int())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_attention_reads_sglangs_rows_as_the_contract_has_them(dtype: torch.dtype) -> None:
    """Lengths of another number of rows are left out, as dp_attention pads queries alone."""
    is_fp8, given = dtype.itemsize == 1, list[Any]()
    cache = torch.zeros(9, 1, 656 if is_fp8 else 576, dtype=dtype)

    def kernel(q: Any, rows: torch.Tensor, slots: Any, scale: float, **rest: Any) -> Any:
        given.append((rows.shape, rows.dtype, rest["sinks"], rest["lengths"]))
        return q[..., :512], None

    q, slots = torch.zeros(4, 5, 576).bfloat16(), torch.zeros(4, 8, dtype=torch.int32)
    sinks = torch.ones(5, dtype=torch.bfloat16)
    for lengths in (torch.ones(4).int(), torch.ones(3).int(), None):
        call: Any = (kernel, q, cache, slots, 0.1, sinks, {}, lengths)
        assert kernels_cuda.attend(*call).shape == (4, 5, 512)
    shape = torch.Size((9, 656 if is_fp8 else 576))
    assert {(entry[:2]) for entry in given} == {(shape, torch.uint8 if is_fp8 else dtype)}
    assert all(entry[2].dtype == torch.float32 for entry in given)
    assert [entry[3] is not None for entry in given] == [True, False, False]


def test_kept_lists_do_not_keep_the_selection() -> None:
    """A chunk's selection is 64 MB on a GPU, and the engine's to free; its memory comes again."""
    lists, slots = KeptLists(), torch.zeros(4, 8)
    freed = weakref.ref(slots)
    lists.of(slots, 1)["packed"] = 1
    assert lists.of(slots, 1) == {"packed": 1}
    assert lists.of(slots, 2) == {}, "another selection in the same tensor"
    del slots
    assert freed() is None
    assert lists.of(torch.zeros(4, 8), 2) == {}


def test_gathered_lists_are_not_broadcast_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the next layer are, if its rows were not split."""
    forwards = SplitForwards(SimpleNamespace())  # type: ignore[arg-type]
    backend, calls = SimpleNamespace(split_forwards=forwards), list[Any]()
    monkeypatch.setattr(kernels_cuda, "get_attn_backend", lambda: backend)
    lists = torch.zeros(2, 3, dtype=torch.int32)

    def original(tensor: torch.Tensor) -> torch.Tensor:
        calls.append(tensor)
        return tensor

    for is_gathered, expected in ((False, 1), (True, 1), (False, 2)):
        forwards.is_gathered |= is_gathered
        assert row_split_cuda._broadcast(original, lists) is lists
        assert len(calls) == expected


# -- SGLang's second top-k ---------------------------------------------------------------------

PAGES, TOPK = torch.randperm(600, generator=torch.Generator().manual_seed(3)).view(2, 300), 16


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
    return page_table[request].gather(1, topk_indices.long())


@pytest.mark.parametrize("at_once", [7, 1000], ids=["in parts", "whole"])
@pytest.mark.parametrize("extend", [[30, 12], [30]], ids=["two requests", "one"])
def test_the_second_topk_gives_slots_of_each_rows_request(
    monkeypatch: pytest.MonkeyPatch, extend: list[int], at_once: int
) -> None:
    """It does for all rows at once and for parts of one request's; parts of several stay with
    SGLang's default, as their rows' requests are known on the device only."""
    monkeypatch.setattr(topk_v2, "topk_transform_ragged_v2", ragged_v2)
    monkeypatch.setattr(transform_index, "transform_index_page_table_prefill", lookup)
    rows, requests = sum(extend), len(extend)
    owners = torch.arange(requests).repeat_interleave(torch.tensor(extend))
    lengths = torch.randint(TOPK, 300, (rows,), dtype=torch.int32)
    starts = (300 * owners).to(torch.int32)
    logits = torch.randn(rows, 300 * requests)
    by_default = list[int]()

    def default(logits: torch.Tensor, **_: Any) -> torch.Tensor:
        by_default.append(len(logits))
        return torch.full((len(logits), TOPK), -1)

    attention: Any = SimpleNamespace(
        page_table_1=PAGES[:requests],
        cu_seqlens_q=torch.tensor([0, *torch.tensor(extend).cumsum(0)], dtype=torch.int32),
        dsa_extend_seq_lens_list=extend,
    )
    topk, parts = SecondTopk(SimpleNamespace(topk_transform=default)), []  # type: ignore[arg-type]
    for first in range(0, rows, at_once):
        part = slice(first, first + at_once)
        how: Any = {"attn_metadata": attention, "row_starts": starts[part]}
        more = {"batch_idx_list": owners[part]} if at_once < rows else {}
        paged = TopkTransformMethod.PAGED
        parts.append(topk.topk_transform(logits[part], lengths[part], TOPK, paged, **how, **more))
    if at_once < rows and requests > 1:
        assert sum(by_default) == rows
        return
    assert by_default == []
    for row, slots in enumerate(torch.cat(parts)):
        seen = logits[row, starts[row] :][: lengths[row]]
        expected = PAGES[owners[row]][seen.topk(TOPK).indices]
        assert set(slots.tolist()) == set(expected.tolist())
