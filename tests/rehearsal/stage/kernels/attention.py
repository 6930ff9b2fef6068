"""Sparse and dense MLA: FlashMLA's and FlashAttention 3's forms, and the latent KV pool."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from tests.rehearsal.stage.kernels.quantized import E4M3, from_groups
from tests.rehearsal.stage.registry import poison, reference

_FLASH_MLA = "sglang.kernels.ops.attention.flash_mla_interface"
_FLASH_ATTENTION = "sglang.kernels.ops.attention.flash_attention"
_ROWS_AT_ONCE = 16


@reference(_FLASH_MLA + ":flash_mla_sparse_fwd")
def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None):  # type: ignore[no-untyped-def]
    """Attention of ``q`` ``[T, H, 576]`` over listed latents, bfloat16; -1 lists nothing.

    The kernel takes heads by 64 and lists by 128.
    """
    latents = kv.view(-1, kv.shape[-1])
    assert q.dtype == latents.dtype == torch.bfloat16
    assert indices.dtype == torch.int32
    assert q.shape[1] % 64 == 0, f"the kernel takes heads by 64, not {q.shape[1]}"
    assert indices.shape[-1] % 128 == 0, f"the kernel takes lists by 128, not {indices.shape[-1]}"
    if indices.numel():
        assert -1 <= int(indices.amin()) <= int(indices.amax()) < len(latents), "a wild index"
    if topk_length is not None:
        unread = torch.arange(indices.shape[-1]) >= topk_length[:, None]
        assert (indices[:, 0][unread] == -1).all(), "entries behind the length of a list"
    out = q.new_zeros(*q.shape[:2], d_v)
    heads = _heads_in_use(q)
    for rows in torch.arange(len(q)).split(_ROWS_AT_ONCE):
        slots = indices[rows, 0].long()
        distinct, place = slots.unique(return_inverse=True)
        keys = latents[distinct.clamp_min(0)].double()
        times = torch.zeros(len(rows), len(distinct), dtype=torch.float64)
        times = times.scatter_add_(1, place, (slots >= 0).double())[:, None]
        logits = q[rows, :heads].double() @ keys.T * sm_scale
        logits = logits.masked_fill(times == 0, float("-inf")) + times.clamp_min(1).log()
        weights = logits.softmax(-1).masked_fill((times == 0).all(-1, keepdim=True), 0)
        value = weights @ keys[:, :d_v].nan_to_num()  # who lists a NaN has it in a logit
        if attn_sink is not None:
            sink = attn_sink[:heads].double()
            value = value * torch.sigmoid(logits.logsumexp(-1) - sink)[..., None]
        out[rows, :heads] = value.to(out.dtype)
    # What the kernel also returns (maxima and sums of its softmax) nobody reads.
    return out, poison(torch.empty(1)), poison(torch.empty(1))


_ROW_BYTES = 656
"""Of an FP8 latent: 512 bytes of e4m3, 4 float32 scales of 128 of them each, 64 bfloat16."""


@reference(_FLASH_MLA + ":get_mla_metadata")
def get_mla_metadata(cache_seqlens=None, num_heads_q=None, topk=None, **rest):  # type: ignore[no-untyped-def]
    """Return a schedule, which a reference has no use for: work parts and splits by request."""
    assert cache_seqlens.dtype == torch.int32
    assert num_heads_q in (64, 128), f"the kernel takes 64 or 128 heads, not {num_heads_q}"
    assert topk % 64 == 0, f"the kernel takes lists by 64, not {topk}"
    parts = torch.zeros(132, 8, dtype=torch.int32)
    return parts, torch.zeros(len(cache_seqlens) + 1, dtype=torch.int32)


@reference(_FLASH_MLA + ":flash_mla_with_kvcache")
def flash_mla_with_kvcache(  # type: ignore[no-untyped-def]
    q, k_cache, head_dim_v, num_splits=None, softmax_scale=None, indices=None,
    is_fp8_kvcache=False, attn_sink=None, kv_format=None, **rest,
):  # fmt: skip
    """Attention of ``q`` ``[B, n, H, 576]`` over listed rows of an FP8 cache; -1 lists nothing.

    ``k_cache`` is ``[pages, 64, 1, 656]``, ``indices`` are slots ``[B, n, k]``.
    """
    assert is_fp8_kvcache
    assert attn_sink is None
    assert kv_format in (None, "V32")
    assert k_cache.shape[1:] == (64, 1, _ROW_BYTES)
    assert q.dtype == torch.bfloat16
    assert q.shape[2] in (64, 128), f"the kernel takes 64 or 128 heads, not {q.shape[2]}"
    assert indices.dtype == torch.int32
    assert indices.shape[-1] % 64 == 0, f"the kernel takes lists by 64, not {indices.shape[-1]}"
    assert len(num_splits) == len(q) + 1
    rows = k_cache.view(torch.uint8).reshape(-1, _ROW_BYTES)
    if indices.numel():
        assert -1 <= int(indices.amin()) <= int(indices.amax()) < len(rows), "a wild index"
    out = q.new_zeros(*q.shape[:3], head_dim_v)
    heads = _heads_in_use(q.flatten(0, 1))
    for query, slots, at in zip(
        q.flatten(0, 1), indices.flatten(0, 1), out.flatten(0, 1), strict=True
    ):
        latents = _from_fp8(rows[slots[slots >= 0].long()])
        if len(latents):
            at[:heads] = _attend(query[:heads], latents, softmax_scale, head_dim_v).to(out.dtype)
    return out, poison(torch.empty(1))


def _from_fp8(rows: torch.Tensor) -> torch.Tensor:
    """Return ``[n, 656]`` bytes as latents ``[n, 576]``."""
    latents = from_groups(rows[:, :512].view(E4M3), rows[:, 512:528].view(torch.float32))
    return torch.cat((latents, rows[:, 528:].view(torch.bfloat16).double()), 1)


def _heads_in_use(q: torch.Tensor) -> int:
    """Return the number of heads without the padding behind them, whose queries are zero."""
    columns = (q != 0).any(-1).any(0).nonzero()
    return int(columns.max()) + 1 if len(columns) else 0


def _attend(q: torch.Tensor, latents: torch.Tensor, scale: float, d_v: int) -> torch.Tensor:
    """Attend with ``[H, D]`` queries over ``[n, D]`` latents, in float64."""
    logits = q.double() @ latents.double().T * scale
    return logits.softmax(-1) @ latents[:, :d_v].double()


@reference(_FLASH_ATTENTION + ":flash_attn_with_kvcache")
def flash_attn_with_kvcache(  # type: ignore[no-untyped-def]
    q, k_cache, v_cache, qv=None, page_table=None, cache_seqlens=None, cu_seqlens_q=None,
    softmax_scale=None, causal=False, **rest,
):  # fmt: skip
    """Attend over a page table: ``q`` is the rotary part, ``qv`` the latent part, one slot a page.

    For DSA the table is the list of selected slots, and ``cache_seqlens`` says how many count.
    """
    assert qv is not None
    assert page_table.dtype == cache_seqlens.dtype == cu_seqlens_q.dtype == torch.int32
    rotary, latent = k_cache.view(-1, k_cache.shape[-1]), v_cache.view(-1, v_cache.shape[-1])
    page = k_cache.shape[1]
    out = poison(torch.empty_like(qv))
    starts = cu_seqlens_q.tolist()
    for b, (start, stop) in enumerate(pairwise(starts)):
        for t in range(start, stop):
            length = int(cache_seqlens[b]) - (stop - 1 - t if causal else 0)
            at = torch.arange(length)
            pages = page_table[b].long()[at // page]
            assert (pages >= 0).all(), "a hole before the end of a list"
            slots = pages * page + at % page
            keys = torch.cat((latent[slots], rotary[slots]), -1)
            query = torch.cat((qv[t], q[t]), -1)
            out[t] = _attend(query, keys, softmax_scale, latent.shape[-1]) if length else 0
    return out


@reference(_FLASH_ATTENTION + ":flash_attn_varlen_func")
def flash_attn_varlen_func(  # type: ignore[no-untyped-def]
    q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, softmax_scale=None, causal=False, **rest
):
    """Multi-head attention of sequences one after the other: prefill without absorption."""
    out = poison(q.new_empty(*q.shape[:2], v.shape[-1]))
    scale = softmax_scale or q.shape[-1] ** -0.5
    queries, keys = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for b in range(len(queries) - 1):
        of = slice(queries[b], queries[b + 1])
        over = slice(keys[b], keys[b + 1])
        logits = torch.einsum("thd,shd->hts", q[of].double(), k[over].double()) * scale
        if causal:
            rows, columns = logits.shape[1:]
            after = torch.arange(columns) > torch.arange(rows)[:, None] + (columns - rows)
            logits = logits.masked_fill(after, float("-inf"))
        out[of] = torch.einsum("hts,shd->thd", logits.softmax(-1), v[over].double()).to(out.dtype)
    return out


@reference("jit:set_mla_kv_buffer.set_mla_kv_buffer")
def set_mla_kv_buffer(buf: Any, loc: Any, nope: Any, rope: Any, num_warps: Any, skip: Any) -> None:
    """Write latents and rotary keys to their slots, but those whose slot is ``skip``."""
    is_written = loc != skip
    buf[loc[is_written].long()] = torch.cat((nope, rope), -1)[is_written].to(buf.dtype)


@reference("jit:hicache_tma.fits_device")
def fits_device(device: int) -> bool:
    """Whether a card can copy by its tensor memory accelerator: Hopper can."""
    return True


@reference("sgl_kernel.get_device_accessible_ptr")
def get_device_accessible_ptr(tensor: torch.Tensor, device: int) -> int:
    """Return where a card finds memory of the host."""
    return tensor.data_ptr()


@reference("sgl_kernel.transfer_kv_direct")
def transfer_kv_direct(src_layers, dst_layers, src_indices, dst_indices, page_size):  # type: ignore[no-untyped-def]
    """Copy rows of each layer between the card's pool and the host's, by whole pages."""
    for indices in (src_indices, dst_indices):
        pages = indices.reshape(-1, page_size)
        assert (pages[:, 0] % page_size == 0).all(), "a page that does not start one"
        assert (pages == pages[:, :1] + torch.arange(page_size)).all(), "a page in pieces"
    for src, dst in zip(src_layers, dst_layers, strict=True):
        dst[dst_indices.long()] = src[src_indices.long()]


@reference("jit:concat_mla_absorb_q.concat_mla_absorb_q")
def concat_mla_absorb_q(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """Write latent and rotary part of a query side by side."""
    out.copy_(torch.cat((a, b), -1))


@reference("jit:concat_mla_k.concat_mla_k")
def concat_mla_k(k: torch.Tensor, nope: torch.Tensor, rope: torch.Tensor) -> None:
    """Write a key's own part beside the rotary part that all heads share."""
    k.copy_(torch.cat((nope, rope.expand(*nope.shape[:2], -1)), -1))
