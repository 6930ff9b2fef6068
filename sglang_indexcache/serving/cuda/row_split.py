"""The row split on NVIDIA GPUs: SGLang's selection of a prefill, called for a share of the rows.

``Indexer._get_topk_ragged`` takes the queries and metadata of a batch, and a share of a batch is a
batch too. So SGLang's kernels and ours can select in a share, with lists in any form. SGLang's own
loop over rows, which depends on each rank's free memory, runs inside a share, before the gather.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from sglang.srt.environ import envs

from sglang_indexcache.serving.cuda import kernels as kernels_cuda
from sglang_indexcache.serving.hooks import around
from sglang_indexcache.serving.process import ServingProcess
from sglang_indexcache.serving.row_split import ON_GPU, RowShare, RowSplit, RowSplitter
from sglang_indexcache.serving.rows import to_device

if TYPE_CHECKING:
    from sglang.srt.layers.attention.dsa.dsa_indexer_metadata import DSAIndexerMetadata
    from sglang.srt.layers.attention.dsa_backend import DSAMetadata

_INDEXER = "sglang.srt.layers.attention.dsa.dsa_indexer"
SelectRows = Callable[..., torch.Tensor]
"""Function from the queries, weights and metadata of some rows, and an output tensor, to their
lists."""


class SplitForwards:
    """Row split of the forward in progress, shared by its F layers.

    Attributes:
        is_gathered: whether all ranks already have the lists that SGLang is about to broadcast.
    """

    def __init__(self, splitter: RowSplitter) -> None:
        self.splitter = splitter
        self.begin()

    @classmethod
    def install(cls, process: ServingProcess, topk: int) -> SplitForwards | None:
        """Make the split if there are several ranks, and wrap SGLang's selection and broadcast."""
        splitter = process.splitter = process.splitter or RowSplitter.here(topk, ON_GPU)
        if splitter is None:
            return None
        kernels_cuda.install()
        if envs.SGLANG_DSA_TOPK_BROADCAST.get():
            around(f"{_INDEXER}._broadcast_indexer_topk_from_rank0", _broadcast)
        return cls(splitter)

    def begin(self) -> None:
        """Forget the last forward: SGLang may reuse its metadata for the next one's lengths."""
        self.is_gathered = False
        self._whole: DSAMetadata | None = None
        self._split: RowSplit | None = None
        self._part: DSAMetadata | None = None

    def split(self, metadata: DSAIndexerMetadata) -> RowSplit | None:
        """Assign the rows of the forward with this metadata to ranks, once for all its layers."""
        whole = metadata.attn_metadata
        if whole is not self._whole:
            lengths = metadata.get_indexer_seq_len_cpu().tolist()
            self._split = self.splitter.split(metadata.get_dsa_extend_len_cpu(), lengths)
            self._whole, self._part = whole, None
        return self._split

    def select(
        self,
        q_fp8: torch.Tensor,
        weights: torch.Tensor,
        metadata: DSAIndexerMetadata,
        topk: int,
        result: torch.Tensor | None,
        select_rows: SelectRows,
    ) -> torch.Tensor:
        """Select for this rank's share and gather the rest, or select for all rows if cheaper.

        Args:
            q_fp8, weights, metadata, result: as for :func:`.kernels.select`, for the whole batch.
            select_rows: selects in a batch of fewer rows, with SGLang's kernels or ours.
        """
        split = self.split(metadata)
        if split is None:
            self.splitter.count(rows := len(metadata.get_seqlens_expanded()), rows)
            return select_rows(q_fp8, weights, metadata, result)

        def select_share(share: RowShare) -> torch.Tensor:
            rows = share.rows
            return select_rows(q_fp8[rows], weights[rows], self.part(metadata, share))

        self.is_gathered = result is None
        lists = kernels_cuda.empty_lists(q_fp8, topk) if result is None else result
        return self.splitter.select(split, lists, select_share)

    def part(self, metadata: DSAIndexerMetadata, share: RowShare) -> DSAIndexerMetadata:
        """Return the metadata for this rank's share."""
        if self._part is None:
            self._part = _cut(metadata.attn_metadata, share)
        return replace(metadata, attn_metadata=self._part)


def _cut(whole: DSAMetadata, share: RowShare) -> DSAMetadata:
    """Return the part of a batch's metadata that an indexer reads for a share of its rows.

    It covers only the keys that the share's rows see, so their places are counted anew
    (``indexer_k_start_end``). Offsets that go into lists (``topk_indices_offset``) stay, because
    attention applies them to the whole batch's keys.
    """
    rows, requests, offsets = share.rows, share.requests, whole.topk_indices_offset
    before = int(whole.indexer_seq_lens_cpu[: share.first].sum())
    starts, ends = whole.indexer_k_start_end
    lengths = torch.tensor(share.key_lens, dtype=whole.indexer_seq_lens_cpu.dtype)

    def cumulative(counts: Sequence[int]) -> torch.Tensor:
        return to_device(torch.tensor([0, *accumulate(counts)], dtype=torch.int32), starts.device)

    return replace(
        whole,
        cu_seqlens_q=cumulative(share.query_lens),
        cu_seqlens_k=cumulative(share.key_lens),
        page_table_1=whole.page_table_1[requests],
        real_page_table=whole.real_page_table[requests],
        dsa_seqlens_expanded=whole.dsa_seqlens_expanded[rows],
        topk_indices_offset=None if offsets is None else offsets[rows],
        indexer_k_start_end=(starts[rows] - before, ends[rows] - before),
        indexer_seq_lens_cpu=lengths,
        indexer_seq_lens=to_device(lengths.to(whole.indexer_seq_lens.dtype), starts.device),
        token_to_batch_idx=whole.token_to_batch_idx[rows] - share.first,
    )


def _broadcast(
    original: Callable[..., torch.Tensor | None], topk_indices: torch.Tensor | None
) -> torch.Tensor | None:
    """Skip SGLang's broadcast if every rank already has the same lists.

    A prefill graph (``topk_result``) keeps its broadcast, because it may replay rows that are not
    split.
    """
    forwards = kernels_cuda.split_forwards()
    if forwards is None or not forwards.is_gathered:
        return original(topk_indices)
    forwards.is_gathered = False
    return topk_indices
