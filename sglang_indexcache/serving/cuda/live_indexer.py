"""SGLang's indexer in live mode, run as the patterns of the forward say."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from sglang.srt.state_capturer.indexer_topk import maybe_capture_indexer_topk

from sglang_indexcache.serving.cuda import kernels as kernels_cuda

if TYPE_CHECKING:
    from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


def indexer_forward(
    original: Callable[..., torch.Tensor | None],
    indexer: Indexer,
    x: torch.Tensor,
    q_lora: torch.Tensor,
    positions: torch.Tensor,
    forward_batch: ForwardBatch,
    layer_id: int,
    return_indices: bool = True,
    use_cuda_graph: bool = True,
) -> torch.Tensor | None:
    """Run the indexer of a layer; if the layer is S for all rows, only store its keys."""
    backend = kernels_cuda.current_backend()
    ours = getattr(backend, "index_buffer", None)
    arguments = (x, q_lora, positions, forward_batch, layer_id, return_indices, use_cuda_graph)
    if ours is None or forward_batch.forward_mode.is_idle() or not return_indices:
        return original(indexer, *arguments)

    if ours.is_full(layer_id):
        selected = original(indexer, *arguments)
        if selected is None:
            return None
        backend.inherit(layer_id, forward_batch)
        used = ours.select(layer_id, selected)
        return used if used is selected else maybe_capture_indexer_topk(layer_id, used)
    from sglang.kernels.ops.quantization.act_quant_triton import act_quant

    metadata = backend.get_indexer_metadata(layer_id, forward_batch)
    indexer._forward_cuda_k_only(
        x, positions, forward_batch, layer_id, act_quant, metadata, return_indices=False
    )
    backend.process.count_key_write(layer_id)
    backend.inherit(layer_id, forward_batch)
    return maybe_capture_indexer_topk(layer_id, ours.shared(layer_id))
