"""MiniMax-M3's attention backend, told which layers take over the blocks of another one.

SGLang's own sharing has all that it needs on NVIDIA GPUs, too: an F layer publishes its blocks, an
S layer skips its indexer and reads them, in decode at an address that CUDA graphs can hold. Only
the gate of its frequency, at the end of ``MiniMaxSparseAttnBackend.__init__``, opens on AMD GPUs
alone. So a subclass writes a pattern where that would have written a frequency.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.layers.attention.minimax_sparse_backend import (
    MiniMaxHybridAttnBackend,
    MiniMaxSparseAttnBackend,
)
from sglang.srt.runtime_context import get_parallel

from sglang_indexcache.errors import SettingsError, StaleIndexError
from sglang_indexcache.serving.active import ActivePattern
from sglang_indexcache.serving.cuda.backend import DECODE_GRAPH
from sglang_indexcache.serving.monitor.traffic import phase_of
from sglang_indexcache.serving.preflight.refusals import check_quantization

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class BlockSharingBackend(MiniMaxSparseAttnBackend):
    """Sparse attention of MiniMax-M3 under a static pattern.

    SGLang's code computes an S layer's blocks anew where it finds none of its F layer's. Here that
    is an error, and in decode so is a buffer that an earlier forward filled.
    """

    def __init__(self, runner: ModelRunner, active: ActivePattern) -> None:
        super().__init__(runner)
        plan = active.plan
        if tuple(self.sparse_layer_ids) != plan.layer_ids:
            raise SettingsError(
                f"the pattern is for layers {plan.layer_ids}, and SGLang built layers "
                f"{tuple(self.sparse_layer_ids)} with sparse attention"
            )
        self.active = active
        # The heads of an indexer are split over GPUs, as those of attention are.
        heads = max(dict(plan.shape)["index_n_heads"] // get_parallel().attn_tp_size, 1)
        active.traffic.flops = 2 * dict(plan.shape)["index_head_dim"] * heads
        self._idx_group_size = max(heads // self.kv_pool.main_pool.head_num, 1)
        self.index_cache_enabled = True
        self._topk_is_source = {
            layer: plan.pattern.is_full(i) for i, layer in enumerate(plan.layer_ids)
        }
        # A group is called by the place of its F layer.
        self._topk_group_of_layer = {
            layer: plan.pattern.source_of(i) for i, layer in enumerate(plan.layer_ids)
        }
        self._is_eager = False
        self._decoded: int | None = None
        """The group whose blocks the decode buffer holds, written in this very forward."""

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Begin an eager forward."""
        self._is_eager = True
        super().init_forward_metadata(forward_batch)
        self._is_eager = False

    def init_forward_metadata_out_graph(
        self, forward_batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """Begin a forward, also one that is captured, which runs its layers three times."""
        self._decoded = None
        self.active.is_counting = not in_capture
        self.active.count_batch(forward_batch)
        if not self._is_eager and phase_of(forward_batch) == "decode":
            self.active.count_graph(DECODE_GRAPH)
        super().init_forward_metadata_out_graph(forward_batch, in_capture)

    def forward_extend(
        self,
        q: Any,
        k: Any,
        v: Any,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Prefill."""
        is_held = self._topk_cache_owner is forward_batch and (
            self._topk_group_of_layer[layer.layer_id] in self._topk_cache
        )
        self._serve(layer.layer_id, is_held=is_held)
        return super().forward_extend(q, k, v, layer, forward_batch, *args, **kwargs)

    def forward_decode(
        self,
        q: Any,
        k: Any,
        v: Any,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Decode."""
        if q.shape[0] not in self._decode_topk_buf:
            raise StaleIndexError(
                f"{q.shape[0]} rows are decoded in a forward that began with others "
                f"({sorted(self._decode_topk_buf)})"
            )
        group = self._topk_group_of_layer[layer.layer_id]
        self._serve(layer.layer_id, is_held=self._decoded == group)
        output = super().forward_decode(q, k, v, layer, forward_batch, *args, **kwargs)
        self._decoded = group
        return output

    def _serve(self, layer: int, *, is_held: bool) -> None:
        """Count what ``layer`` is about to do; an S layer needs that its blocks are held."""
        if self._topk_is_source[layer]:
            self.active.count_selection(layer)
        elif is_held:
            self.active.count_reuse(layer)
        else:
            source = self.active.plan.layer_ids[self._topk_group_of_layer[layer]]
            raise StaleIndexError(
                f"layer {layer} shares the blocks of layer {source}, which has selected none in "
                "this forward"
            )


def create_blocks_backend(
    runner: ModelRunner, dense: Any, active: ActivePattern
) -> MiniMaxHybridAttnBackend:
    """Create the backend of one runner, as SGLang does; ``dense`` is that of its other layers.

    Raises:
        SettingsError: SGLang would serve these weights with another one.
    """
    check_quantization(active.plan, runner.model_config.quantization)
    sparse = BlockSharingBackend(runner, active)
    return MiniMaxHybridAttnBackend(dense, sparse, sparse.sparse_layer_ids)
