"""The reference attention backend: DSA with shared indices, in torch, on a CPU.

The method has three parts: :class:`IndexBuffer` decides whose indices a layer uses,
``cpu/indexer.py`` selects them if the layer is F, and :meth:`CpuIndexCacheBackend._attend` attends
to the selected latent rows. Everything else is SGLang's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from sglang.srt.configs.model_config import get_dsa_index_topk
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from sglang_indexcache.errors import StaleIndexError
from sglang_indexcache.serving.cpu.select import ROW_BLOCK, HostBatch
from sglang_indexcache.serving.index_buffer import IndexBuffer
from sglang_indexcache.serving.process import ServingProcess
from sglang_indexcache.serving.row_split import ON_CPU, RowSplit, RowSplitter
from sglang_indexcache.serving.rows import patterns_of_rows

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

GATHER_BYTES = 4 << 20
"""Upper bound for the latent rows gathered for one block of queries, so that they stay in the
cache."""


class CpuIndexCacheBackend(AttentionBackend):
    """Attention for prefill, chunked prefill, decode and mixed batches over SGLang's paged pool."""

    def __init__(self, runner: ModelRunner, process: ServingProcess) -> None:
        super().__init__()
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.index_keys = runner.token_to_kv_pool.index_key_cache
        self.process = process
        self.index_buffer = IndexBuffer(process, runner.layer_info.start_layer)
        self.batch = HostBatch((), (), torch.empty(0, 0, dtype=torch.int64))
        self.splitter = _splitter(runner, process)
        self.split: RowSplit | None = None
        self._slots_of: tuple[object, torch.Tensor, torch.Tensor] | None = None

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Begin a forward: reset the index buffer and lay out the batch."""
        rows = patterns_of_rows(forward_batch, self.process)
        self.process.count_batch(forward_batch)
        self.index_buffer.begin(rows)
        self._slots_of = None
        key_lens = tuple(forward_batch.seq_lens.tolist())
        if forward_batch.forward_mode.is_decode_or_idle():
            query_lens = (1,) * len(key_lens)
        else:
            query_lens = tuple(forward_batch.extend_seq_lens.tolist())
        longest = max(key_lens, default=0)
        slots = self.req_to_token_pool.req_to_token[forward_batch.req_pool_indices, :longest]
        self.batch = HostBatch(query_lens, key_lens, slots)
        if self.splitter is not None:
            is_prefill = not forward_batch.forward_mode.is_decode_or_idle()
            self.split = self.splitter.split(query_lens, key_lens) if is_prefill else None

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        q_rope: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
        topk_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend to the selected tokens by absorbed MLA.

        Args:
            q: ``[T, heads, kv_lora_rank]`` absorbed queries.
            k: ``[T, 1, kv_lora_rank]`` new latent rows, which are also the values.
            q_rope: ``[T, heads, rope]`` rotated query part.
            k_rope: ``[T, 1, rope]`` rotated key part.
            topk_indices: ``[T, k]`` request-local positions from this layer's indexer, or from its
                F layer if SGLang carried them here.

        Returns:
            ``[T, heads * kv_lora_rank]`` in ``q``'s dtype.
        """
        assert q_rope is not None, "the DSA path passes split queries"
        assert k_rope is not None, "the DSA path passes split keys"
        if save_kv_cache:
            self.token_to_kv_pool.set_mla_kv_buffer(layer, forward_batch.out_cache_loc, k, k_rope)
        indices = self._indices(layer.layer_id, forward_batch, topk_indices, q.shape[0])
        latent = self.token_to_kv_pool.get_key_buffer(layer.layer_id).squeeze(1)
        heads = layer.tp_q_head_num
        queries = torch.cat([q.view(-1, heads, layer.v_head_dim), q_rope], dim=-1)
        output = sparse_mla(
            queries.to(latent.dtype),
            latent,
            self._physical_slots(indices),
            layer.scaling,
            layer.v_head_dim,
        )
        return output.flatten(1).to(q.dtype)

    forward_extend = forward_decode = _attend

    def _indices(
        self, layer: int, forward_batch: ForwardBatch, carried: torch.Tensor | None, rows: int
    ) -> torch.Tensor:
        """Return the indices that ``layer`` attends to in ``rows`` rows; SGLang passes ``carried``.

        An F layer's indexer has already written its selection to the buffer (``cpu/indexer.py``).
        """
        if not self.index_buffer.is_full(layer):
            self.index_buffer.adopt(layer, carried)
        indices = self.index_buffer.read(layer, rows)
        # SGLang drops padding before attention, so ``carried`` is another view of the same memory.
        if carried is not None and _layout(carried) != _layout(indices):
            raise StaleIndexError(
                f"SGLang carried other indices to layer {layer} than its F layer selected"
            )
        self.process.count_layer(layer, is_full=self.index_buffer.is_full(layer))
        return indices

    def _physical_slots(self, indices: torch.Tensor) -> torch.Tensor:
        """Pool slots of ``indices``, translated once for a whole group of layers."""
        group = (self.index_buffer.writes, *_layout(indices))
        if self._slots_of is None or self._slots_of[0] != group:
            # Hold the indices, so that no other tensor can be allocated at the same address.
            self._slots_of = (group, indices, self.batch.physical_slots(indices))
        return self._slots_of[2]

    def support_triton(self) -> bool:
        """Return False: Triton does not run on this platform."""
        return False

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the length of the dummy requests that dp_attention pads a batch with."""
        return 1

    get_cpu_graph_seq_len_fill_value = get_cuda_graph_seq_len_fill_value


def _splitter(runner: ModelRunner, process: ServingProcess) -> RowSplitter | None:
    """Make the row splitter, which cuts between whole blocks of the rows that indexers score."""
    if process.plan.split_rows != "off" and process.splitter is None:
        topk = get_dsa_index_topk(runner.model_config.hf_config)
        process.splitter = RowSplitter.here(topk, ON_CPU, free=topk, block=ROW_BLOCK)
    return process.splitter


def _layout(indices: torch.Tensor) -> tuple[object, ...]:
    """Return a tensor's address and layout in memory."""
    return indices.data_ptr(), indices.shape, indices.stride(), indices.dtype


def sparse_mla(
    q: torch.Tensor,
    latent: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
    value_dim: int,
) -> torch.Tensor:
    """Compute :func:`sglang_indexcache.kernels.sparse_mla.reference.sparse_mla` in less memory.

    Work and memory grow with ``T x k``: the selected rows of a block of queries are gathered, then
    multiplied in a batch, so no mask over the whole context is made.

    It is less precise: products are computed and rounded in the dtype of ``q`` and ``latent``. In
    bfloat16 the scores have 8 bits, so their error exceeds what ``mla_tolerance`` allows a GPU
    kernel.
    """
    tokens, heads, dim = q.shape
    out = q.new_zeros(tokens, heads, value_dim)
    places = torch.arange(1, slots.shape[1] + 1)
    chosen = torch.where(slots >= 0, places, 0).amax(-1)  # index after each row's last slot
    longest = int(chosen.max()) if tokens else 0
    if longest == 0:
        return out
    block = max(1, GATHER_BYTES // (longest * dim * q.element_size()))
    scratch = latent.new_empty(min(block, tokens) * longest, dim)
    for low in range(0, tokens, block):
        rows = slice(low, min(low + block, tokens))
        width = int(chosen[rows].max())
        if width:
            listed = slots[rows, :width]
            values = _attend(q[rows], _gather(latent, listed, scratch), listed < 0, scale)
            empty = (chosen[rows] == 0)[:, None, None]
            out[rows] = values[..., :value_dim].masked_fill_(empty, 0.0)
    return out


def _gather(latent: torch.Tensor, slots: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """Gather ``[count, width, D]`` rows of ``[count, width]`` slots into ``scratch``."""
    # Padding repeats one of the row's own slots: other latent rows must not be read, even with
    # weight 0.
    readable = torch.where(slots < 0, slots.amax(-1, keepdim=True), slots).clamp_min_(0)
    rows = scratch[: slots.numel()]
    torch.index_select(latent, 0, readable.reshape(-1), out=rows)
    return rows.view(*slots.shape, -1)


def _attend(
    q: torch.Tensor, rows: torch.Tensor, padding: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attend from one block of queries to the rows gathered for each, except ``padding``."""
    scores = torch.bmm(q, rows.transpose(1, 2)).float().mul_(scale)
    scores.masked_fill_(padding.unsqueeze(1), float("-inf"))
    # A query without any row must attend to nothing: with a finite peak its weights are exp(-inf) =
    # 0.
    peak = scores.amax(-1, keepdim=True).clamp_min_(torch.finfo(scores.dtype).min)
    weights = scores.sub_(peak).exp_()
    weights /= weights.sum(-1, keepdim=True).clamp_min_(torch.finfo(scores.dtype).tiny)
    # Multiply whole rows: slicing the values out first would cost a strided copy.
    return torch.bmm(weights.to(rows.dtype), rows)
