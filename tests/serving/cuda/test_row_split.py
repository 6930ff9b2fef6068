"""Shares of a batch in SGLang's own metadata: what several ranks select is what one would."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.dsa import utils

from sglang_indexcache.kernels.contract import PADDING
from sglang_indexcache.serving.cuda import kernels as kernels_cuda
from sglang_indexcache.serving.cuda import row_split as row_split_cuda
from sglang_indexcache.serving.cuda.kernels import EngineKernels
from sglang_indexcache.serving.cuda.row_split import SplitForwards
from sglang_indexcache.serving.row_split import GatherCost, RowSplitter
from tests.serving.cuda.test_kernels import (
    FORWARDS,
    HEADS,
    TOPK,
    make_backend,
    make_batch,
    make_indexer,
    make_queries,
    one_gpu,
    torch_logits,
)
from tests.serving.test_row_split import Ranks

__all__ = ["one_gpu", "torch_logits"]
pytestmark = pytest.mark.usefixtures("seed")
ALWAYS = GatherCost(-(10**9), 1)
PREFILLS = {name: forward for name, forward in FORWARDS.items() if forward[0].is_extend()}
PREFILLS = {name: forward for name, forward in PREFILLS.items() if not forward[3]}
Original = Callable[..., torch.Tensor]


def by_sglang(backend: Any) -> Original:
    """Return SGLang's selection in torch, which reads what ``_get_topk_ragged`` reads.

    That method gathers keys with a kernel in Triton; the rehearsal runs it.
    """

    def select(
        _indexer: Any,
        _dual: bool,
        _batch: Any,
        _layer: int,
        q: torch.Tensor,
        weights: torch.Tensor,
        metadata: Any,
        result: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if result is None:
            result = torch.full((len(q), TOPK), PADDING, dtype=torch.int32)
        lengths = metadata.get_indexer_seq_len_cpu().tolist()
        assert lengths == metadata.get_indexer_seq_len().tolist()
        tables = metadata.attn_metadata.page_table_1
        table = torch.cat([tables[i, :n] for i, n in enumerate(lengths)]).long()
        pages = backend.token_to_kv_pool.pages
        keys = pages[:, : 64 * 128].unflatten(1, (64, 128))[table // 64, table % 64]
        scales = pages[:, 64 * 128 :].view(torch.float32)[table // 64, table % 64]
        starts, ends = metadata.get_indexer_kvcache_range()
        rows = len(starts)
        assert ends.max() <= len(table)
        keys = keys.view(torch.float8_e4m3fn)
        gates = weights[:rows].squeeze(-1)
        logits = utils._fp8_mqa_logits_torch(q[:rows], (keys, scales), gates, starts, ends)
        positions = replace(metadata, force_unfused_topk=True).topk_transform(
            logits, TOPK, ks=starts
        )
        # As SGLang's fused kernels map them: by the row's request, or by the row's offset.
        if metadata.attn_metadata.topk_indices_offset is not None:
            places = positions + metadata.attn_metadata.topk_indices_offset[:, None]
        else:
            counts = metadata.attn_metadata.cu_seqlens_q.diff().tolist()
            owners = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
            assert torch.equal(owners, metadata.get_token_to_batch_idx().long())
            places = tables[owners].gather(1, positions.clamp_min(0).long())
        result[:rows] = torch.where(positions < 0, PADDING, places.to(torch.int32))
        return result

    return select


def selected_by(
    count: int,
    monkeypatch: pytest.MonkeyPatch,
    backend: Any,
    call: Callable[[Any], torch.Tensor],
    *,
    is_eager: bool = True,
) -> list[torch.Tensor]:
    """Return what each of ``count`` ranks selects; each is a thread with a backend of its own."""
    ranks, local = Ranks(count), threading.local()
    monkeypatch.setattr(kernels_cuda, "get_attn_backend", lambda: local.backend)
    results: list[torch.Tensor | None] = [None] * count

    def run(rank: int) -> None:
        local.backend = copy.copy(backend)
        local.backend.split_forwards = SplitForwards(RowSplitter(ranks.member(rank), TOPK, ALWAYS))
        results[rank] = call(local.backend)
        assert local.backend.split_forwards.is_gathered == is_eager
        assert torch.equal(call(local.backend), results[rank])  # the next layer

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(result is not None for result in results)
    return [result for result in results if result is not None]


@pytest.mark.parametrize("form", ["slots", "positions", "offsets"])
@pytest.mark.parametrize("forward", PREFILLS)
@pytest.mark.parametrize("is_ours", [True, False], ids=["ours", "sglangs"])
def test_several_ranks_select_what_one_does(
    monkeypatch: pytest.MonkeyPatch,
    torch_logits: None,
    is_ours: bool,
    forward: str,
    form: str,
) -> None:
    """They do with both kernels, for each form of lists, to the bit; dp_attention adds rows."""
    mode, lengths, extend, _ = PREFILLS[forward]
    backend = make_backend(monkeypatch, fp8=form == "offsets", fused=form != "positions")
    batch = make_batch(backend, mode, lengths, extend)
    backend.init_forward_metadata(batch)
    metadata = backend.get_indexer_metadata(0, batch)
    q, weights = make_queries(backend, sum(extend) + 3)
    if not is_ours:
        backend.kernels = EngineKernels()
    original = by_sglang(backend)

    def call(_: Any) -> torch.Tensor:
        layer = make_indexer(), False, batch, 0, q, weights, metadata
        return kernels_cuda.ragged(original, *layer)

    monkeypatch.setattr(kernels_cuda, "get_attn_backend", lambda: backend)
    whole = call(backend)
    assert (whole[: sum(extend)] >= 0).any(1).all()
    for part in selected_by(3, monkeypatch, backend, call):
        assert torch.equal(part, whole)


def test_a_graph_keeps_its_buffer(monkeypatch: pytest.MonkeyPatch, torch_logits: None) -> None:
    """Rows of padding hold what they held, and no more is written than the rows."""
    backend = make_backend(monkeypatch)
    batch = make_batch(backend, FORWARDS["first prefill"][0], [130, 5], [130, 5])
    backend.init_forward_metadata(batch)
    metadata = backend.get_indexer_metadata(0, batch)
    q, weights = make_queries(backend, 135)
    padded = torch.cat([weights, torch.full((25, HEADS, 1), torch.nan)])

    def call(_: Any) -> torch.Tensor:
        buffer = torch.full((160, TOPK), -7, dtype=torch.int32)
        layer = make_indexer(), False, batch, 0, q, padded, metadata, buffer
        assert kernels_cuda.ragged(None, *layer) is buffer  # type: ignore[arg-type]
        return buffer

    monkeypatch.setattr(kernels_cuda, "get_attn_backend", lambda: backend)
    whole = call(backend)
    for buffer in selected_by(2, monkeypatch, backend, call, is_eager=False):
        assert torch.equal(buffer[:135], whole[:135])
        assert (buffer[135:] == -7).all()


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


def test_each_forward_is_dealt_out_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own lengths decide, also where SGLang writes them into the metadata of the one before."""
    lengths = [3]
    splitter = SimpleNamespace(split=lambda queries, keys: (tuple(queries), tuple(keys)))
    metadata: Any = SimpleNamespace(
        attn_metadata=object(),
        get_indexer_seq_len_cpu=lambda: torch.tensor(lengths),
        get_dsa_extend_len_cpu=lambda: list(lengths),
    )
    backend = make_backend(monkeypatch)
    backend.split_forwards = SplitForwards(splitter)  # type: ignore[arg-type]
    batch = make_batch(backend, FORWARDS["first prefill"][0], [130, 5], [130, 5])
    backend.init_forward_metadata(batch)
    assert backend.split_forwards.split(metadata) == ((3,), (3,))
    lengths[0] = 5
    assert backend.split_forwards.split(metadata) == ((3,), (3,))  # of another layer
    backend.init_forward_metadata(batch)
    assert backend.split_forwards.split(metadata) == ((5,), (5,))
