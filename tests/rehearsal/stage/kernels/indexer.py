"""The lightning indexer: quantised queries and keys, logits, and both families of top-k.

An index-K page holds 64 tokens: 64 times 128 bytes of float8 e4m3, then 64 float32 scales.
SGLang's top-k kernels on Hopper take ``index_topk`` 2,048 only; these take any, so that short
prompts select.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.rehearsal.stage.kernels.quantized import E4M3, quantize
from tests.rehearsal.stage.kernels.rotary import rotate
from tests.rehearsal.stage.registry import poison, reference

PAGE = 64
WIDTH = 128
LEAST = 1e-4
"""What the largest value of a key or query is taken for where it is smaller."""

reference("deep_gemm:set_pdl", "deep_gemm:set_num_sms")(lambda *_: None)
reference("deep_gemm:get_num_sms")(lambda *_: 132)
reference("jit:occupancy_cluster_probe.get_max_active_clusters")(lambda size, _: 132 // size)


def store(pages: torch.Tensor, slots: torch.Tensor, key: torch.Tensor) -> None:
    """Write keys ``[T, 128]`` to their slots; a page is ``64 * (128 + 4)`` bytes."""
    assert pages.dtype == torch.uint8
    assert pages.shape[1] == PAGE * (WIDTH + 4)
    assert pages.is_contiguous()
    values, scales = quantize(key, LEAST)
    page, offset = slots.long() // PAGE, slots.long() % PAGE
    pages[:, : PAGE * WIDTH].unflatten(1, (PAGE, WIDTH))[page, offset] = values.view(torch.uint8)
    pages[:, PAGE * WIDTH :].view(torch.float32)[page, offset] = scales


@reference("jit:fused_store_index_k_cache.fused_store_index_k_cache")
def fused_store_index_k_cache(key: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
    """Quantise keys and write them."""
    store(pages, slots, key)


def _key(
    k: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """LayerNorm, then interleaved rotary embedding, of keys ``[T, 128]``, in float64."""
    normed = torch.nn.functional.layer_norm(
        k.double(), k.shape[-1:], weight.double(), bias.double(), eps
    )
    return rotate(normed[:, None], cos_sin, positions, neox=False)[:, 0]


@reference("jit:dpsk_v32_k_indexer_norm_rope.forward")
def k_norm_rope(k, out, weight, bias, cos_sin, positions, eps):  # type: ignore[no-untyped-def]
    """Norm and rotate an index key, not stored yet."""
    out.copy_(_key(k, weight, bias, cos_sin, positions, eps))


@reference("jit:dpsk_v32_k_indexer_norm_rope_store.forward")
def k_norm_rope_store(k, pages, slots, weight, bias, cos_sin, positions, eps):  # type: ignore[no-untyped-def]
    """Norm and rotate an index key on its way into the cache."""
    store(pages, slots, _key(k, weight, bias, cos_sin, positions, eps))


@reference("jit:dpsk_v4_main_q_indexer_rope_first_quant.forward")
def q_rope_quant(q, q_fp8, weight, weights_out, weight_scale, cos_sin, positions):  # type: ignore[no-untyped-def]
    """Index queries in e4m3, their scales folded into the heads' weights."""
    values, scales = quantize(rotate(q, cos_sin, positions, neox=False), LEAST)
    q_fp8.copy_(values)
    weights_out.copy_((weight.double() * weight_scale * scales.double())[..., None])


def scores(
    q: torch.Tensor, keys: torch.Tensor, scales: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Return ``sum_h w[t, h] * relu(q[t, h] . k[s]) * scale[s]`` as float32 ``[T, S]``."""
    assert q.dtype == keys.dtype == E4M3
    assert q.shape[-1] == WIDTH
    dots = torch.einsum("thd,sd->ths", q.double(), keys.double()).relu_()
    return (torch.einsum("th,ths->ts", weights.double(), dots) * scales.double()).float()


@reference("deep_gemm:fp8_mqa_logits")
def fp8_mqa_logits(q, kv, weights, ks, ke, clean_logits=False, max_seqlen_k=0, **_):  # type: ignore[no-untyped-def]
    """Logits ``[T, S]``; outside ``ks`` to ``ke`` they are undefined unless cleaned."""
    assert ks.dtype == ke.dtype == torch.int32
    assert len(ks) == len(ke) == len(q) == len(weights)
    logits = scores(q, kv[0], kv[1], weights)
    at = torch.arange(logits.shape[1])
    outside = (at < ks[:, None]) | (at >= ke[:, None])
    return logits.masked_fill_(outside, float("-inf") if clean_logits else float("nan"))


@reference("deep_gemm:get_paged_mqa_logits_metadata")
def get_paged_mqa_logits_metadata(context_lens, block_kv, num_sms, indices=None):  # type: ignore[no-untyped-def]
    """Return a schedule, which a reference has no use for."""
    return torch.zeros(num_sms + 1, 2, dtype=torch.int32)


@reference("deep_gemm:fp8_paged_mqa_logits")
def fp8_paged_mqa_logits(  # type: ignore[no-untyped-def]
    q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len,
    clean_logits=False, indices=None,
):  # fmt: skip
    """Logits ``[B * next, max]`` of paged keys; behind a sequence's end they are undefined."""
    batch, following = q.shape[:2]
    assert q.dtype == E4M3
    assert context_lens.dtype == torch.int32
    assert block_table.dtype == torch.int32
    out = torch.empty(batch * following, max_context_len)
    out = out.fill_(float("-inf")) if clean_logits else poison(out)
    flat = kv_cache.view(len(kv_cache), -1)
    keys = flat[:, : PAGE * WIDTH].unflatten(1, (PAGE, WIDTH)).view(E4M3)
    scales = flat[:, PAGE * WIDTH :].view(torch.float32)
    for b in range(batch):
        length = int(context_lens[b].max())
        if length:
            rows = slice(b * following, (b + 1) * following)
            pages = block_table[b, : -(-length // PAGE)].long()
            assert ((pages >= 0) & (pages < len(keys))).all(), "a page outside the cache"
            visible = keys[pages].flatten(0, 1)[:length]
            out[rows, :length] = scores(
                q[b], visible, scales[pages].flatten()[:length], weights[rows]
            )
    return out


def best(row: torch.Tensor, length: int, k: int) -> torch.Tensor:
    """The places of the ``k`` largest of the first ``length`` logits; all, if they are no more."""
    if length <= k:
        return torch.arange(length)
    visible = row[:length]
    assert not visible.isnan().any(), "an undefined logit is read"
    return torch.topk(visible.float(), k)[1]


def _lists(
    logits: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    starts: torch.Tensor | None,
    place: Callable[[int, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Fill ``out`` ``[T, k]``: of each row what ``place`` makes of its best, then -1."""
    out.fill_(-1)
    for row in range(len(logits)):
        start = 0 if starts is None else int(starts[row])
        places = best(logits[row, start:], int(lengths[row]), out.shape[1])
        out[row, : len(places)] = place(row, places).to(out.dtype)
    return out


@reference("jit:dpsk_v4_topk_v2.topk_plan")
def topk_plan(lengths: torch.Tensor, plan: torch.Tensor, threshold: Any) -> None:
    """A schedule, which a reference has no use for."""
    plan.zero_()


@reference("jit:dpsk_v4_topk_v2.topk_transform_ragged")
def topk_ragged(logits, lengths, starts, offsets, out):  # type: ignore[no-untyped-def]
    """Indices into the batch's keys, one request after the other."""
    _lists(logits, lengths, out, starts, lambda row, places: places + offsets[row])


@reference("jit:dpsk_v4_topk_v2.topk_transform_paged")
def topk_paged(logits, lengths, table, out, page, plan, raw=None):  # type: ignore[no-untyped-def]
    """Slots of the KV pool; in ``raw`` the places within the sequence."""
    if raw is not None:
        _lists(logits, lengths, raw, None, lambda _, places: places)

    def slot(row: int, places: torch.Tensor) -> torch.Tensor:
        return places if table is None else table[row].long()[places // page] * page + places % page

    _lists(logits, lengths, out, None, slot)


def _new(logits: torch.Tensor, k: int) -> torch.Tensor:
    return torch.empty(len(logits), k, dtype=torch.int32)


@reference("sgl_kernel:fast_topk_v2")
def fast_topk(score, lengths, topk, row_starts=None):  # type: ignore[no-untyped-def]
    """Places within each row."""
    return _lists(score, lengths, _new(score, topk), row_starts, lambda _, places: places)


@reference("sgl_kernel:fast_topk_transform_fused")
def fast_topk_transform(score, lengths, page_table_size_1, cu_seqlens_q, topk, row_starts=None):  # type: ignore[no-untyped-def]
    """Slots of the KV pool, by a table of one slot a token for each request."""
    request = torch.bucketize(torch.arange(len(score)), cu_seqlens_q.long()[1:], right=True)
    return _lists(
        score, lengths, _new(score, topk), row_starts,
        lambda row, places: page_table_size_1[request[row]][places],
    )  # fmt: skip


@reference("sgl_kernel:fast_topk_transform_ragged_fused")
def fast_topk_ragged(score, lengths, topk_indices_offset, topk, row_starts=None):  # type: ignore[no-untyped-def]
    """Indices into the batch's keys, one request after the other."""
    return _lists(
        score, lengths, _new(score, topk), row_starts,
        lambda row, places: places + topk_indices_offset[row],
    )  # fmt: skip
