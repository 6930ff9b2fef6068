"""The lightning indexer on a CPU, in torch (SGLang has "no native (pure-torch) path").

It follows ``Indexer.forward_cuda`` of ``sglang/srt/layers/attention/dsa/dsa_indexer.py``. The
indices are positions within each request, ascending, so that they mean the same to every rank and
to transformers. The KV pool below is SGLang's, with torch in place of its Triton writers.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.index_key_cache import IndexKeyCache
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool
from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang.srt.state_capturer.indexer_topk import maybe_capture_indexer_topk

from sglang_indexcache.kernels.contract import INDEX_DIM, PADDING, page_bytes
from sglang_indexcache.kernels.indexer import quantization
from sglang_indexcache.kernels.indexer.quantization import hadamard, quantize_e4m3
from sglang_indexcache.serving.cpu.select import HostBatch, every_visible, select_topk
from sglang_indexcache.serving.process import published_plan

if TYPE_CHECKING:
    from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    from sglang_indexcache.serving.cpu.backend import CpuIndexCacheBackend


def indexer_forward(
    indexer: Indexer,
    x: torch.Tensor,
    q_lora: torch.Tensor,
    positions: torch.Tensor,
    forward_batch: ForwardBatch,
    layer_id: int,
    return_indices: bool = True,
) -> torch.Tensor | None:
    """Store this layer's index keys, then select or reuse indices, and count the time.

    It takes hidden states ``[T, hidden]`` and normalised query latents ``[T, q_lora_rank]``.

    Returns:
        ``[T, index_topk]`` int32 request-local positions, padded with -1. Rows for which this layer
        is S have the positions of their F layer.
    """
    if forward_batch.forward_mode.is_idle():
        # A rank without requests only keeps step with the other ranks. Its rows, if any, are
        # padding that no layer attends with, so nothing is stored, read or counted.
        return x.new_full((x.shape[0], indexer.index_topk), PADDING, dtype=torch.int32)
    wall, processor = time.perf_counter(), time.thread_time()
    backend: CpuIndexCacheBackend = get_attn_backend()
    indices = _store_and_select(
        indexer, backend, x, q_lora, positions, forward_batch, layer_id, return_indices
    )
    backend.process.count_indexer_time(
        "decode" if forward_batch.forward_mode.is_decode() else "prefill",
        time.perf_counter() - wall,
        time.thread_time() - processor,
    )
    return None if indices is None else maybe_capture_indexer_topk(layer_id, indices)


def _store_and_select(
    indexer: Indexer,
    backend: CpuIndexCacheBackend,
    x: torch.Tensor,
    q_lora: torch.Tensor,
    positions: torch.Tensor,
    forward_batch: ForwardBatch,
    layer_id: int,
    return_indices: bool,
) -> torch.Tensor | None:
    backend.index_keys.store(
        layer_id, forward_batch.out_cache_loc, _keys(indexer, x, positions, backend)
    )
    if not return_indices:
        return None
    if not backend.index_buffer.is_full(layer_id):
        # Live mode: this layer's key is stored for other patterns; its indices come from an F
        # layer.
        backend.process.count_key_write(layer_id)
        return backend.index_buffer.shared(layer_id)
    if max(backend.batch.key_lens, default=0) <= indexer.index_topk:
        everything = every_visible(backend.batch, x.shape[0], indexer.index_topk)
        return backend.index_buffer.select(layer_id, everything)
    queries, weights = index_queries(indexer, x, q_lora, positions, backend)

    def select_rows(rows: slice, batch: HostBatch) -> torch.Tensor:
        def load(slots: torch.Tensor) -> torch.Tensor:
            return backend.index_keys.load(layer_id, slots)

        return select_topk(queries[rows], weights[rows], load, batch, indexer.index_topk)

    splitter, split, batch = backend.splitter, backend.split, backend.batch
    if splitter is None or split is None:
        selected = select_rows(slice(None), batch)
        if splitter is not None and not forward_batch.forward_mode.is_decode():
            splitter.count(batch.num_rows, batch.num_rows)
    else:
        out = queries.new_full((len(queries), indexer.index_topk), PADDING, dtype=torch.int32)
        selected = splitter.select(
            split, out, lambda share: select_rows(share.rows, batch.share(share))
        )
    return backend.index_buffer.select(layer_id, selected)


def index_queries(
    indexer: Indexer,
    x: torch.Tensor,
    q_lora: torch.Tensor,
    positions: torch.Tensor,
    backend: CpuIndexCacheBackend,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the index queries and head weights for some rows of a forward.

    The queries are ``[R, H, D]`` in the dtype of the stored keys; the weights are ``[R, H]``
    float32 and include all scales.
    """
    queries, scales = _queries(indexer, q_lora, positions, backend)
    return queries, _head_gates(indexer, x) * scales


def _head_gates(indexer: Indexer, x: torch.Tensor) -> torch.Tensor:
    """Return ``[T, H]`` float32: the gate of each head times both softmax scales."""
    gates = torch.nn.functional.linear(x.float(), indexer.weights_proj.weight.float())
    return gates * (indexer.n_heads**-0.5 * indexer.softmax_scale)


def _queries(
    indexer: Indexer, q_lora: torch.Tensor, positions: torch.Tensor, backend: CpuIndexCacheBackend
) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Return ``[T, H, D]`` queries in the stored keys' dtype, and the scale that restores them."""
    queries, _ = indexer.wq_b(q_lora)
    queries = queries.view(-1, indexer.n_heads, indexer.head_dim)
    queries = _rotate(indexer, queries, positions)
    if not backend.index_keys.stores_fp8:
        return queries.to(backend.index_keys.compute_dtype), 1.0
    values, scales = quantize_e4m3(_spread(indexer, queries), power_of_two=indexer.is_neox_style)
    return values.to(backend.index_keys.compute_dtype), scales


def _keys(
    indexer: Indexer, x: torch.Tensor, positions: torch.Tensor, backend: CpuIndexCacheBackend
) -> torch.Tensor:
    """Return ``[T, D]`` index keys, ready to store."""
    keys, _ = indexer.wk(x)
    keys = indexer.k_norm(keys).view(-1, 1, indexer.head_dim)
    keys = _rotate(indexer, keys, positions).squeeze(1)
    return _spread(indexer, keys) if backend.index_keys.stores_fp8 else keys


def _rotate(indexer: Indexer, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotate the leading ``rope_head_dim`` entries of ``[T, H, D]`` (RoPE)."""
    width = indexer.rope_head_dim
    # SGLang rotates a query and a key together, perhaps in place: pass a copy, and a dummy key.
    rope = heads[..., :width].contiguous()
    rotated, _ = indexer.rotary_emb(positions, rope, torch.zeros_like(rope[:, :1]))
    return torch.cat([rotated.view_as(rope), heads[..., width:]], dim=-1)


def _spread(indexer: Indexer, heads: torch.Tensor) -> torch.Tensor:
    """Apply the Hadamard rotation that DeepSeek-V3.2 uses before quantisation.

    SGLang omits it for the GLM models, which have interleaved RoPE (``Indexer._maybe_rotate``).
    """
    return hadamard(heads) if indexer.is_neox_style else heads


class CpuIndexKeyCache(IndexKeyCache):
    """Index keys as plain rows (bfloat16, float32) or as the GPU's fp8 pages.

    ``buffer`` has ``[pages, bytes or values per page]`` for each layer; in static mode S layers
    have none.
    """

    def _buffer_shape(self, num_pages: int) -> tuple[int, int]:
        pool = self.pool
        if self.stores_fp8:
            return num_pages, page_bytes(pool.index_head_dim)
        return num_pages, pool.page_size * pool.index_head_dim

    @property
    def stores_fp8(self) -> bool:
        """Whether keys are stored in the GPU's format, as fp8 pages."""
        return self.pool.index_k_with_scale_buffer_dtype == torch.uint8

    def _rows(self, layer_id: int) -> torch.Tensor:
        """Return a plain buffer as ``[slots, head_dim]``."""
        buffer = self.buffer[layer_id - self.pool.start_layer]
        return buffer.view(-1, self.pool.index_head_dim)

    def store(self, layer_id: int, slots: torch.Tensor, keys: torch.Tensor) -> None:
        """Store ``keys`` ``[T, head_dim]`` at token ``slots`` ``[T]``."""
        if self.stores_fp8:
            values, scales = quantization.quantize_e4m3(keys)
            pages = self.buffer[layer_id - self.pool.start_layer]
            quantization.write_pages(pages, slots, values, scales)
        else:
            rows = self._rows(layer_id)
            rows.index_copy_(0, slots, keys.to(rows.dtype))

    def load(self, layer_id: int, slots: torch.Tensor) -> torch.Tensor:
        """Load keys ``[T, head_dim]`` from token ``slots``; keys stored as fp8 become float32."""
        if self.stores_fp8:
            pages = self.buffer[layer_id - self.pool.start_layer]
            values, scales = quantization.read_pages(pages, slots, self.pool.index_head_dim)
            return values.float() * scales[:, None]
        return self._rows(layer_id).index_select(0, slots)

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype that :meth:`load` returns and that queries must have."""
        return torch.float32 if self.stores_fp8 else self.pool.index_k_with_scale_buffer_dtype


class CpuDSATokenToKVPool(DSATokenToKVPool):
    """Latent rows ``[slots, 1, kv_lora_rank + rope]`` and index keys of any width, on a CPU."""

    def __init__(self, *args: Any, index_head_dim: int, **kwargs: Any) -> None:
        self._index_key_width = index_head_dim
        # SGLang's class asserts the one width that its kernels can read. It allocates no keys
        # before the method below sets the model's own width.
        super().__init__(*args, index_head_dim=INDEX_DIM, **kwargs)

    def _create_index_key_cache(self) -> CpuIndexKeyCache:
        self.index_head_dim = self._index_key_width
        self.index_k_with_scale_buffer_dtype = self._index_k_dtype()
        return CpuIndexKeyCache(self, self.index_buf_size)

    def _index_k_dtype(self) -> torch.dtype:
        plan = published_plan()
        choice = plan.index_k_dtype if plan else "auto"
        if choice == "fp8_e4m3":
            return torch.uint8
        return self.dtype if choice == "auto" else getattr(torch, choice)

    def _scatter_mla_rows(
        self,
        dst_buffer: torch.Tensor,
        loc: torch.Tensor,
        cache_k_nope: torch.Tensor,
        cache_k_rope: torch.Tensor,
    ) -> None:
        rows = torch.cat([cache_k_nope, cache_k_rope], dim=-1).view(-1, *dst_buffer.shape[1:])
        dst_buffer.index_copy_(0, loc.long(), rows)
