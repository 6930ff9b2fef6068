"""The CPU platform's KV pool: SGLang's DSA pool with torch in place of its Triton writers."""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.index_key_cache import IndexKeyCache
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

from sglang_indexcache.kernels.contract import page_bytes
from sglang_indexcache.kernels.indexer import quantization
from sglang_indexcache.serving.active import published_plan


class CpuIndexKeyCache(IndexKeyCache):
    """Index keys as plain rows (bfloat16, float32) or as the GPU's fp8 pages.

    ``buffer`` holds one tensor per layer, ``[pages, bytes or values of a page]``; a layer that
    shares its indices in static mode has no pages.
    """

    def _buffer_shape(self, num_pages: int) -> tuple[int, int]:
        pool = self.pool
        if self.stores_fp8:
            return num_pages, page_bytes(pool.index_head_dim)
        return num_pages, pool.page_size * pool.index_head_dim

    @property
    def stores_fp8(self) -> bool:
        """Whether keys are stored as the GPU's fp8 pages."""
        return self.pool.index_k_with_scale_buffer_dtype == torch.uint8

    def _rows(self, layer_id: int) -> torch.Tensor:
        """A plain buffer as ``[slots, head_dim]``."""
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
        """Keys ``[T, head_dim]`` of token ``slots``; float32 where they are stored as fp8."""
        if self.stores_fp8:
            pages = self.buffer[layer_id - self.pool.start_layer]
            values, scales = quantization.read_pages(pages, slots, self.pool.index_head_dim)
            return values.float() * scales[:, None]
        return self._rows(layer_id).index_select(0, slots)

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype that :meth:`load` returns and that queries must have."""
        return torch.float32 if self.stores_fp8 else self.pool.index_k_with_scale_buffer_dtype

    def move(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Relocate single tokens, page layout or not (SGLang's IndexKeyCache.move)."""
        if self.stores_fp8:
            super().move(tgt_loc, src_loc)
            return
        for layer in range(self.pool.start_layer, self.pool.start_layer + self.pool.layer_num):
            rows = self._rows(layer)
            if rows.shape[0]:
                rows[tgt_loc.view(-1).long()] = rows[src_loc.view(-1).long()]


class CpuDSATokenToKVPool(DSATokenToKVPool):
    """Latent rows ``[slots, 1, kv_lora_rank + rope]`` and index keys, on a CPU."""

    def _create_index_key_cache(self) -> CpuIndexKeyCache:
        self.index_k_with_scale_buffer_dtype = self._index_k_dtype()
        return CpuIndexKeyCache(self, self.index_buf_size)

    def _index_k_dtype(self) -> torch.dtype:
        plan = published_plan()
        asked = plan.index_k_dtype if plan else "auto"
        if asked == "fp8_e4m3":
            return torch.uint8
        return self.dtype if asked == "auto" else getattr(torch, asked)

    def _scatter_mla_rows(
        self,
        dst_buffer: torch.Tensor,
        loc: torch.Tensor,
        cache_k_nope: torch.Tensor,
        cache_k_rope: torch.Tensor,
    ) -> None:
        rows = torch.cat([cache_k_nope, cache_k_rope], dim=-1).view(-1, *dst_buffer.shape[1:])
        dst_buffer.index_copy_(0, loc.long(), rows)
