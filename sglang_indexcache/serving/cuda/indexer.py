"""Run SGLang's indexer by the pattern of a forward: in live mode, and in one of several graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from sglang.srt.state_capturer.indexer_topk import maybe_capture_indexer_topk

from sglang_indexcache.kernels.indexer.quantization import quantize_e4m3
from sglang_indexcache.serving.cuda import kernels as kernels_cuda

if TYPE_CHECKING:
    from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


def index_queries(
    indexer: Indexer,
    x: torch.Tensor,
    q_lora: torch.Tensor,
    positions: torch.Tensor,
    forward_batch: ForwardBatch,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what SGLang's indexer multiplies its keys with, for some rows of a forward.

    ``[R, H, D]`` float32 of what FP8 holds, and ``[R, H]`` float32 weights, all scales in them.
    """
    queries, _, gates = indexer._get_q_k_bf16(q_lora, x, positions, False, forward_batch)
    gates = indexer._weights_proj_bf16_in_fp32_out(x) if gates is None else gates.float()
    values, scales = quantize_e4m3(queries, power_of_two=not indexer.use_dsa_indexer_fusion)
    return values.float(), gates * scales * (indexer.n_heads**-0.5 * indexer.softmax_scale)


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
    """Run the indexer of a layer; where the layer is S for all rows, only store its key."""
    backend = kernels_cuda.current_backend()
    ours = getattr(backend, "index_buffer", None)
    arguments = (x, q_lora, positions, forward_batch, layer_id, return_indices, use_cuda_graph)
    if ours is None or forward_batch.forward_mode.is_idle() or not return_indices:
        return original(indexer, *arguments)

    def queries(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return index_queries(indexer, x[rows], q_lora[rows], positions[rows], forward_batch)

    if ours.is_full(layer_id):
        selected = original(indexer, *arguments)
        if selected is None or backend.active.plan.mode == "static":
            return selected
        backend.inherit(layer_id, forward_batch)
        used = ours.select(layer_id, selected)
        backend.selected(layer_id, forward_batch, used, indexer=indexer, queries=queries)
        return used if used is selected else maybe_capture_indexer_topk(layer_id, used)
    from sglang.kernels.ops.quantization.act_quant_triton import act_quant

    metadata = backend.get_indexer_metadata(layer_id, forward_batch)
    indexer._forward_cuda_k_only(
        x, positions, forward_batch, layer_id, act_quant, metadata, return_indices=False
    )
    backend.active.count_key_write(layer_id)
    backend.inherit(layer_id, forward_batch)
    backend.selected(
        layer_id, forward_batch, ours.shared(layer_id), indexer=indexer, queries=queries
    )
    return maybe_capture_indexer_topk(layer_id, ours.shared(layer_id))
