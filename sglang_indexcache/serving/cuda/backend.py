"""The CUDA backend: SGLang's DSA backend, plus the index buffer.

What is added is one question per attention layer, :meth:`IndexBuffer.read`. It matters where SGLang
carries no indices itself: between the sub-batches of two-batch overlap, across layers without DSA,
and in live mode. The kernels are SGLang's unless ``--indexcache-kernels`` asks for ours.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from sglang.kernels.ops.attention.utils import concat_mla_absorb_q_general
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.configs.model_config import get_dsa_index_topk
from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend, TopkTransformMethod
from sglang.srt.model_executor.runner_utils.capture_mode import get_capture_attention_variant
from sglang.srt.runtime_context import get_exec
from sglang.srt.state_capturer.indexer_topk import maybe_capture_indexer_topk

from sglang_indexcache.errors import SettingsError
from sglang_indexcache.kernels.dispatch import Machine
from sglang_indexcache.kernels.indexer.quantization import quantize_e4m3, read_pages
from sglang_indexcache.serving.active import ActivePattern
from sglang_indexcache.serving.cuda import graph_variants, window
from sglang_indexcache.serving.cuda import kernels as kernels_cuda
from sglang_indexcache.serving.cuda.choice import choose
from sglang_indexcache.serving.cuda.graph_variants import GraphVariants
from sglang_indexcache.serving.cuda.kernels import EngineKernels, KeptLists, attend
from sglang_indexcache.serving.hooks import around
from sglang_indexcache.serving.index_buffer import IndexBuffer
from sglang_indexcache.serving.monitor.traffic import phase_of
from sglang_indexcache.serving.preflight.options import MODE
from sglang_indexcache.serving.preflight.refusals import stage_starts_here
from sglang_indexcache.serving.rows import patterns_of_rows

if TYPE_CHECKING:
    from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_indexcache.kernels.contract import SparseMLA
    from sglang_indexcache.serving.monitor.shadow import Part

logger = logging.getLogger(__name__)

DECODE_GRAPH = "decode"
"""The label of SGLang's only decode graph of a batch size, without ``--indexcache-graphs``."""


def create_cuda_backend(runner: ModelRunner, active: ActivePattern) -> IndexCacheBackend:
    """Create a backend of one runner.

    Raises:
        SettingsError: a combination in which indices cannot reach a shared layer.
    """
    backend = IndexCacheBackend(runner, active)
    if active.pattern.window and not backend.use_fused_topk:
        raise SettingsError(
            f"the recent window of {active.pattern} needs lists that attention reads as they are, "
            "and SGLang makes no such lists here. Unset SGLANG_DSA_FUSE_TOPK, or drop the window."
        )
    backend.kernels = _load_kernels(runner, active)
    if get_exec().overlap.enable_two_batch_overlap:
        _check_overlap(backend)
    if active.plan.graphs:
        backend.graphs = _more_graphs(runner, active)
    if active.plan.graphs or active.plan.mode == "live":
        target = "sglang.srt.layers.attention.dsa.dsa_indexer.Indexer.forward_cuda"
        around(target, _indexer_forward)
    return backend


class IndexCacheBackend(DeepseekSparseAttnBackend):
    """DSA attention that knows whose indices each layer uses.

    Attributes:
        first_overlapped_layer: under two-batch overlap, the first layer that runs on sub-batches.
        graphs: the decode graphs, where there are several of a batch size.
    """

    graphs: GraphVariants | None = None

    def __init__(self, runner: ModelRunner, active: ActivePattern) -> None:
        super().__init__(runner)
        self.active = active
        self.index_buffer = IndexBuffer(active, runner.layer_info.start_layer)
        self.first_overlapped_layer = getattr(
            runner.model_config.hf_config, "first_k_dense_replace", 0
        )
        self._runner = runner
        self.kernels = EngineKernels()
        self._attention: SparseMLA | None = None
        self._entries: torch.Tensor | None = None
        """``[rows]`` int32: of the lists that a layer with a window is about to attend to."""
        self._lists = KeptLists()

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Begin an eager forward."""
        self.active.is_counting = True
        self._begin(forward_batch)
        super().init_forward_metadata(forward_batch)

    def init_forward_metadata_out_graph(
        self, forward_batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """Begin a forward that is captured or replayed; a capture runs the layers three times."""
        self.active.is_counting = not in_capture
        label = get_capture_attention_variant() if in_capture else None
        if self.graphs is not None and label is not None:
            count, device = forward_batch.batch_size, forward_batch.seq_lens.device
            self.index_buffer.begin(self.graphs.rows(label, count, device))
        elif self.graphs is not None and self.active.plan.mode == "live":
            # A replay, which runs no layer's Python.
            served = self.graphs.served
            self.active.count_forward("decode", served, idle=not served)
        else:
            self._begin(forward_batch)
        if self._of_whole_batch() is self and phase_of(forward_batch) == "decode":
            self.active.count_graph(DECODE_GRAPH if self.graphs is None else self.graphs.label)
        self.active.shadow.skip()
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
        """Prefill. Short prompts may take dense attention, which selects nothing."""
        if not self.use_mha:
            topk_indices = self._indices(layer.layer_id, forward_batch, topk_indices, q.shape[0])
        self._attention = self.kernels.attention(forward_batch.forward_mode)
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
        """Decode."""
        topk_indices = self._indices(layer.layer_id, forward_batch, topk_indices, q.shape[0])
        self._attention = self.kernels.attention(forward_batch.forward_mode)
        return super().forward_decode(
            q, k, v, layer, forward_batch, *args, topk_indices=topk_indices, **kwargs
        )

    # SGLang's two methods above store the key, map the indices and call one of these three, by
    # keyword, with the slots of every row.

    def _forward_flashmla_sparse(self, **call: Any) -> torch.Tensor:
        if self._attention is None:
            if self._entries is not None:
                call["topk_length"] = self._entries
            return super()._forward_flashmla_sparse(**call)
        return self._attend(call["q_all"], call["page_table_1"], call, call["attn_sink"])

    def _forward_flashmla_kv(self, **call: Any) -> torch.Tensor:
        if self._attention is None:
            return super()._forward_flashmla_kv(**call)
        return self._attend(call["q_all"], call["page_table_1"], call)

    def _forward_fa3(self, **call: Any) -> torch.Tensor:
        if self._attention is None:
            if (entries := self._entries) is not None:
                padding = call["cache_seqlens"][len(entries) :]
                call["cache_seqlens"] = torch.cat([entries, padding]) if len(padding) else entries
            return super()._forward_fa3(**call)
        assert not call["logit_cap"], "no DSA model caps its attention logits"
        q = concat_mla_absorb_q_general(call["q_nope"], call["q_rope"])
        return self._attend(q, call["page_table"], call)

    def _attend(
        self,
        q: torch.Tensor,
        slots: torch.Tensor,
        call: dict[str, Any],
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert self._attention is not None
        kept = self._lists.of(slots, self.index_buffer.writes)
        return attend(self._attention, q, call["kv_cache"], slots, call["sm_scale"], sinks, kept)

    def _indices(
        self, layer: int, forward_batch: ForwardBatch, carried: torch.Tensor | None, rows: int
    ) -> torch.Tensor:
        """What attention takes for ``rows`` rows, where SGLang brings ``carried``."""
        ours = self.index_buffer
        if carried is None:
            self.inherit(layer, forward_batch)
        if not ours.is_full(layer):
            self.active.count_reuse(layer)
            ours.adopt(layer, carried)
        else:
            self.active.count_selection(layer)
            if self.active.plan.mode == "static":  # in live mode _indexer_forward has written
                before = ours.held
                ours.select(layer, carried)
                self.look(layer, forward_batch, before, own=carried)
        indices, self._entries = ours.read(layer, rows), None
        if ours.window(layer):
            widen = partial(self._with_windows, forward_batch)
            indices, self._entries = ours.widened(layer, indices, widen)
        return indices

    def look(
        self,
        layer: int,
        batch: ForwardBatch,
        lists: torch.Tensor | None,
        indexer: Indexer | None = None,
        **own: Any,
    ) -> None:
        """Let the shadow compare; see :meth:`Shadow.look`. Pooled index keys are other lists."""
        shadow = self.active.shadow
        if not shadow.parts or batch.tbo_parent_token_range is not None:
            return
        if (pool := self.token_to_kv_pool).index_kpool > 1:
            return

        def slots(part: Part) -> torch.Tensor:
            line = batch.req_pool_indices[part.request : part.request + 1]
            return self.req_to_token[:, : max(part.sees)].index_select(0, line)[0]

        def entries(part: Part) -> torch.Tensor:
            method = self.get_topk_transform_method(batch.forward_mode)
            if self.use_fused_topk and method != TopkTransformMethod.RAGGED:
                return slots(part)
            positions = torch.arange(max(part.sees), device=self.req_to_token.device)
            if not self.use_fused_topk:
                return positions
            return positions + self.forward_metadata.topk_indices_offset[part.rows[0]]

        def keys(part: Part, start: int, stop: int) -> torch.Tensor:
            assert indexer is not None, "live mode"
            pages = indexer._get_index_k_read_buffer(pool, layer)
            values, scales = read_pages(pages, slots(part)[start:stop].long(), pool.index_head_dim)
            return values.float() * scales[:, None]

        shadow.look(self.active.position(layer), lists, entries, keys=keys, **own)

    def _with_windows(
        self, batch: ForwardBatch, lists: torch.Tensor, windows: torch.Tensor | int, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ragged = self.get_topk_transform_method(batch.forward_mode) == TopkTransformMethod.RAGGED
        offsets = self.forward_metadata.topk_indices_offset if ragged else None
        return window.widen(lists, windows, width, batch, self.req_to_token, offsets)

    def inherit(self, layer: int, forward_batch: ForwardBatch) -> None:
        """Sub-batch: take over what the whole batch selected before it was split."""
        if (rows := forward_batch.tbo_parent_token_range) is not None:
            whole = self._of_whole_batch().index_buffer
            count = _rows_of_part(forward_batch)
            self.index_buffer.inherit(layer, whole, rows, count, self.first_overlapped_layer)

    def _begin(self, forward_batch: ForwardBatch) -> None:
        whole = self._of_whole_batch()
        # The view of a batch that is replayed as a graph lacks the field, and has one pattern.
        part = getattr(forward_batch, "tbo_parent_token_range", None)
        if part is not None and self.active.plan.mode == "live":
            rows = whole.index_buffer.rows.cut(part[0], part[1], _rows_of_part(forward_batch))
        else:
            rows = patterns_of_rows(forward_batch, self.active)
        if whole is self:
            self.active.count_batch(forward_batch)
        self.index_buffer.begin(rows)

    def _of_whole_batch(self) -> IndexCacheBackend:
        """Under two-batch overlap the runner has a backend for whole batches and one per part."""
        backend: IndexCacheBackend = kernels_cuda.unwrapped(
            getattr(self._runner.attn_backend, "primary", self)
        )
        return backend


def _rows_of_part(forward_batch: ForwardBatch) -> int:
    """SGLang pads the halves of an overlap for attention's tensor parallelism, each by itself."""
    start, stop = forward_batch.tbo_parent_token_range
    return forward_batch.tbo_padded_len or stop - start


def _more_graphs(runner: ModelRunner, active: ActivePattern) -> GraphVariants:
    """The decode graphs of ``--indexcache-graphs``; SGLang will ask for them before it captures."""
    topk = get_dsa_index_topk(runner.model_config.hf_config)
    variants = GraphVariants(active, stage_starts_here(active.plan), topk)
    graph_variants.install(variants)
    logger.info(
        "IndexCache: %d decode graphs of each batch size: %s. SGLang says below what they take.",
        len(variants.capture_labels),
        ", ".join(variants.capture_labels),
    )
    return variants


def _load_kernels(runner: ModelRunner, active: ActivePattern) -> EngineKernels:
    """What ``--indexcache-kernels`` asks for, on the GPU of this worker."""
    if active.plan.kernels == "engine":
        return EngineKernels()
    cfg = resolving_view(runner.server_args)
    routes = choose(active.plan.kernels, cfg, runner.model_config, Machine.here())
    kernels = EngineKernels.load(routes)
    if kernels.selects:
        kernels_cuda.install()
    return kernels


def _check_overlap(backend: IndexCacheBackend) -> None:
    """Offsets into a flattened batch (RAGGED) mean something else in a sub-batch than in it.

    In live mode a request may name any pattern, so the first of these layers may be S.
    """
    first = backend.first_overlapped_layer
    plan = backend.active.plan
    positions = [i for i, layer in enumerate(plan.layer_ids) if layer >= first]
    if not positions or (plan.pattern.is_full(positions[0]) and plan.mode == "static"):
        return
    if positions[0] == 0 or not _may_flatten(backend):  # the first layer is F in every pattern
        return
    way = "Make that layer F" if plan.mode == "static" else f"Use {MODE.flag} static"
    raise SettingsError(
        f"under --enable-two-batch-overlap layer {first} is the first to run on sub-batches, and "
        f"with this prefill kernel indices cannot be cut in two. {way}, or choose "
        "--dsa-prefill-backend flashmla_kv."
    )


def _may_flatten(backend: IndexCacheBackend) -> bool:
    """Whether some prefill's indices are offsets into a flattened batch.

    SGLang decides it for each batch (``set_dsa_prefill_impl``) under ``flashmla_auto`` over FP8 on
    Blackwell; elsewhere it is decided by now.
    """
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    if backend.enable_auto_select_prefill_impl and backend.dsa_kv_cache_store_fp8:
        return bool(backend._is_blackwell())
    method = backend.get_topk_transform_method(ForwardMode.EXTEND)
    return bool(method == TopkTransformMethod.RAGGED)


def index_queries(
    indexer: Indexer,
    x: torch.Tensor,
    q_lora: torch.Tensor,
    positions: torch.Tensor,
    forward_batch: ForwardBatch,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What SGLang's indexer multiplies its keys with, for some rows of a forward.

    ``[R, H, D]`` float32 of what FP8 holds, and ``[R, H]`` float32 weights, all scales in them.
    """
    asked, _, gates = indexer._get_q_k_bf16(q_lora, x, positions, False, forward_batch)
    gates = indexer._weights_proj_bf16_in_fp32_out(x) if gates is None else gates.float()
    values, scales = quantize_e4m3(asked, power_of_two=not indexer.use_dsa_indexer_fusion)
    return values.float(), gates * scales * (indexer.n_heads**-0.5 * indexer.softmax_scale)


def _indexer_forward(
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
    """A layer with an indexer that is S for all rows, in live mode or a graph, stores its key."""
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
        backend.look(layer_id, forward_batch, used, indexer, queries=queries)
        return used if used is selected else maybe_capture_indexer_topk(layer_id, used)
    from sglang.kernels.ops.quantization.act_quant_triton import act_quant

    metadata = backend.get_indexer_metadata(layer_id, forward_batch)
    indexer._forward_cuda_k_only(
        x, positions, forward_batch, layer_id, act_quant, metadata, return_indices=False
    )
    backend.active.count_key_write(layer_id)
    backend.inherit(layer_id, forward_batch)
    backend.look(layer_id, forward_batch, ours.shared(layer_id), indexer, queries=queries)
    return maybe_capture_indexer_topk(layer_id, ours.shared(layer_id))
