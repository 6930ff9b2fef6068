"""The CUDA backend: SGLang's DSA backend, plus the index buffer.

It adds one call per attention layer, :meth:`IndexBuffer.read`. This call matters where SGLang
carries no indices itself: into the sub-batches of two-batch overlap, across layers without DSA, and
in live mode. The kernels are SGLang's unless ``--indexcache-kernels`` asks for ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from sglang.kernels.ops.attention.utils import concat_mla_absorb_q_general
from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend
from sglang.srt.state_capturer.indexer_topk import maybe_capture_indexer_topk

from sglang_indexcache.serving.cuda import kernels as kernels_cuda
from sglang_indexcache.serving.cuda.kernels import EngineKernels, KeptLists, attend
from sglang_indexcache.serving.cuda.row_split import SplitForwards
from sglang_indexcache.serving.index_buffer import IndexBuffer
from sglang_indexcache.serving.process import ServingProcess
from sglang_indexcache.serving.rows import patterns_of_rows
from sglang_indexcache.serving.traffic import phase_of

if TYPE_CHECKING:
    from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
    from sglang.srt.model_executor.model_runner import ModelRunner

DECODE_GRAPH = "decode"
"""Label under which replays of SGLang's decode graphs are counted."""


class IndexCacheBackend(DeepseekSparseAttnBackend):
    """DSA attention that knows whose indices each layer uses.

    Attributes:
        first_overlapped_layer: under two-batch overlap, the first layer that runs on sub-batches.
        split_forwards: splits the rows of prefills over the ranks; None without a row split.
    """

    split_forwards: SplitForwards | None = None

    def __init__(self, runner: ModelRunner, process: ServingProcess) -> None:
        super().__init__(runner)
        self.process = process
        self.index_buffer = IndexBuffer(process, runner.layer_info.start_layer)
        # SGLang splits a batch after the dense layers, so these select for the whole batch.
        self.first_overlapped_layer = getattr(
            runner.model_config.hf_config, "first_k_dense_replace", 0
        )
        self._runner = runner
        self.kernels = EngineKernels()
        self._mode: ForwardMode | None = None
        self._lists = KeptLists()

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Begin an eager forward."""
        # A graph capture may have switched counting off.
        self.process.is_counting = True
        self._begin(forward_batch)
        super().init_forward_metadata(forward_batch)

    def init_forward_metadata_out_graph(
        self, forward_batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """Begin a forward that is captured or replayed. A capture runs the layers three times."""
        self.process.is_counting = not in_capture
        self._begin(forward_batch)
        # Both halves of an overlap call this too, and their replay must count once.
        if self._of_whole_batch() is self and phase_of(forward_batch) == "decode":
            self.process.count_graph(DECODE_GRAPH)
        super().init_forward_metadata_out_graph(forward_batch, in_capture)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        *args: Any,
        topk_indices: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Run a prefill's attention. Short prompts may use dense attention, without selection."""
        if not self.use_mha:
            topk_indices = self._indices(layer.layer_id, forward_batch, topk_indices, q.shape[0])
        self._mode = forward_batch.forward_mode
        return super().forward_extend(
            q, k, v, layer, forward_batch, *args, topk_indices=topk_indices, **kwargs
        )

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        *args: Any,
        topk_indices: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Run a decode step's attention."""
        topk_indices = self._indices(layer.layer_id, forward_batch, topk_indices, q.shape[0])
        self._mode = forward_batch.forward_mode
        return super().forward_decode(
            q, k, v, layer, forward_batch, *args, topk_indices=topk_indices, **kwargs
        )

    # SGLang's two methods above store the key, map the indices to slots and call one of these three
    # methods, by keyword, with the slots of every row.

    def _forward_flashmla_sparse(self, **call: Any) -> torch.Tensor:
        q = call["q_all"]
        if (ours := self._ours(q, call)) is None:
            padded = with_heads_for_flashmla(call, self.device_sm_major)
            out: torch.Tensor = super()._forward_flashmla_sparse(**padded)
            return out if padded is call else out[:, : q.shape[1]]
        return ours(q, call["page_table_1"], call["topk_length"], call["attn_sink"])

    def _forward_flashmla_kv(self, **call: Any) -> torch.Tensor:
        if (ours := self._ours(call["q_all"], call)) is None:
            return super()._forward_flashmla_kv(**call)
        lengths = call["metadata"].dsa_cache_seqlens_int32
        return ours(call["q_all"], call["page_table_1"], lengths)

    def _forward_fa3(self, **call: Any) -> torch.Tensor:
        if (ours := self._ours(call["q_nope"], call)) is None:
            return super()._forward_fa3(**call)
        assert not call["logit_cap"], "no DSA model caps its attention logits"
        # Our kernel takes the joined query, as FlashMLA does; FA3 takes its two parts.
        q = concat_mla_absorb_q_general(call["q_nope"], call["q_rope"])
        return ours(q, call["page_table"], call["cache_seqlens"])

    def _ours(self, q: torch.Tensor, call: dict[str, Any]) -> Callable[..., torch.Tensor] | None:
        """Return our attention kernel for ``q`` ``[T, H, D]``, or None for SGLang's."""
        cache, mode = call["kv_cache"], self._mode
        assert mode is not None, "a forward has begun"
        kernel = self.kernels.attention(mode, q, cache)
        if kernel is None:
            return None

        def attend_to(
            q: torch.Tensor,
            slots: torch.Tensor,
            lengths: torch.Tensor,
            sinks: torch.Tensor | None = None,
        ) -> torch.Tensor:
            # Packed lists are made once for all layers of a group, because they have the same
            # slots.
            kept = self._lists.of(slots, self.index_buffer.writes)
            return attend(kernel, q, cache, slots, call["sm_scale"], sinks, kept, lengths)

        return attend_to

    def _indices(
        self, layer: int, forward_batch: ForwardBatch, carried: torch.Tensor | None, rows: int
    ) -> torch.Tensor:
        """Return the indices that ``layer`` attends to in ``rows`` rows; SGLang passes ``carried``.

        For an F layer ``carried`` is its indexer's selection, which is written to the buffer here;
        in live mode :func:`live_indexer_forward` has already written it.
        """
        buffer = self.index_buffer
        # SGLang carries no indices across the layer at which it splits a batch.
        if carried is None:
            self.inherit(layer, forward_batch)
        if not buffer.is_full(layer):
            buffer.adopt(layer, carried)
        elif self.process.plan.mode == "static":
            buffer.select(layer, carried)
        indices = buffer.read(layer, rows)
        self.process.count_layer(layer, is_full=buffer.is_full(layer))
        return indices

    def inherit(self, layer: int, forward_batch: ForwardBatch) -> None:
        """Take over, for a sub-batch, the indices that the batch selected before it was split."""
        if (rows := forward_batch.tbo_parent_token_range) is not None:
            whole = self._of_whole_batch().index_buffer
            count = _rows_of_part(forward_batch)
            self.index_buffer.inherit(layer, whole, rows, count, self.first_overlapped_layer)

    def _begin(self, forward_batch: ForwardBatch) -> None:
        whole = self._of_whole_batch()
        # SGLang's view of a replayed graph's batch lacks this field; such a batch has one pattern.
        part = getattr(forward_batch, "tbo_parent_token_range", None)
        if part is not None and self.process.plan.mode == "live":
            rows = whole.index_buffer.rows.cut(part[0], part[1], _rows_of_part(forward_batch))
        else:
            rows = patterns_of_rows(forward_batch, self.process)
        # Each half of an overlap begins a forward too, so count only the whole batch.
        if whole is self:
            self.process.count_batch(forward_batch)
        self.index_buffer.begin(rows)
        if self.split_forwards is not None:
            self.split_forwards.begin()

    def _of_whole_batch(self) -> IndexCacheBackend:
        """Return the backend of the whole batch; under two-batch overlap each part has its own."""
        backend: IndexCacheBackend = kernels_cuda.unwrapped(
            getattr(self._runner.attn_backend, "primary", self)
        )
        return backend


def live_indexer_forward(
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
    """Run the indexer of a layer in live mode; if it is S for all rows, only store its keys."""
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


def with_heads_for_flashmla(call: dict[str, Any], sm_major: int) -> dict[str, Any]:
    """Return a call of ``_forward_flashmla_sparse``, padded to a number of heads that it takes.

    The kernel takes multiples of 64 heads on Hopper and of 128 on Blackwell. SGLang pads to one
    such block, and only if the number of heads divides it: 20 heads (the paper's model) or 96 fail
    an assertion. Here any number is padded with zero queries, whose outputs the caller drops.

    Args:
        call: keyword arguments of SGLang's method; ``q_all`` is ``[T, H, 576]``, ``attn_sink``
            ``[H]`` or None.
        sm_major: major compute capability of the card.
    """
    q, block = call["q_all"], 128 if sm_major >= 10 else 64
    heads = q.shape[1]
    if heads % block == 0 or block % heads == 0:
        return call
    more = -heads % block
    sink = call.get("attn_sink")
    sinks = sink if sink is None else torch.nn.functional.pad(sink, (0, more))
    return {
        **call,
        "q_all": torch.nn.functional.pad(q, (0, 0, 0, more)),
        "attn_sink": sinks,
    }


def _rows_of_part(forward_batch: ForwardBatch) -> int:
    """Return the number of a part's rows, which SGLang pads for attention's tensor parallelism."""
    start, stop = forward_batch.tbo_parent_token_range
    return forward_batch.tbo_padded_len or stop - start
