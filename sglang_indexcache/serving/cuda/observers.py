"""The observers of the CUDA backend (``cuda/backend.py``): the drift shadow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.dsa_backend import TopkTransformMethod

from sglang_indexcache.kernels.indexer.quantization import read_pages
from sglang_indexcache.serving.monitor.observer import Observer

if TYPE_CHECKING:
    from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    from sglang_indexcache.serving.monitor.shadow import Part


class ShadowProbe(Observer):
    """The drift shadow's view of a forward on a GPU: its lists, slots and index keys."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def selected(
        self,
        layer: int,
        batch: ForwardBatch,
        lists: torch.Tensor | None,
        *,
        indexer: Indexer | None = None,
        **own: Any,
    ) -> None:
        """Let the shadow compare; see :meth:`Shadow.look`. Pooled index keys are other lists."""
        backend, shadow = self._backend, self._backend.active.shadow
        if not shadow.parts or batch.tbo_parent_token_range is not None:
            return
        if (pool := backend.token_to_kv_pool).index_kpool > 1:
            return

        def slots(part: Part) -> torch.Tensor:
            line = batch.req_pool_indices[part.request : part.request + 1]
            return backend.req_to_token[:, : max(part.sees)].index_select(0, line)[0]

        def entries(part: Part) -> torch.Tensor:
            method = backend.get_topk_transform_method(batch.forward_mode)
            if backend.use_fused_topk and method != TopkTransformMethod.RAGGED:
                return slots(part)
            positions = torch.arange(max(part.sees), device=backend.req_to_token.device)
            if not backend.use_fused_topk:
                return positions
            return positions + backend.forward_metadata.topk_indices_offset[part.rows[0]]

        def keys(part: Part, start: int, stop: int) -> torch.Tensor:
            assert indexer is not None, "live mode"
            pages = indexer._get_index_k_read_buffer(pool, layer)
            values, scales = read_pages(pages, slots(part)[start:stop].long(), pool.index_head_dim)
            return values.float() * scales[:, None]

        shadow.look(backend.active.position(layer), lists, entries, keys=keys, **own)
