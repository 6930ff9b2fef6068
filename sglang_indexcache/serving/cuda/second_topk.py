"""SGLang's second top-k kernel, used in a prefill in place of its default.

SGLang selects in decode with a kernel that an H100 ran faster than the default kernel for prefills
(``benchmarks/results/kernels/h100.md``). SGLang uses the faster one in a prefill too, but only for
lists of offsets (RAGGED). :class:`SecondTopk` replaces ``metadata.topk_backend`` where lists are
pool slots (PAGED): the kernel returns positions, which the page lookup of SGLang's unfused top-k
turns into slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.environ import envs
from sglang.srt.layers.attention.dsa.dsa_topk_backend import DSATopKBackend, TopkTransformMethod

if TYPE_CHECKING:
    from sglang.srt.layers.attention.dsa.dsa_indexer_metadata import DSAIndexerMetadata
    from sglang.srt.layers.attention.dsa_backend import DSAMetadata


def takes_second_topk(metadata: DSAIndexerMetadata) -> bool:
    """Return whether SGLang would select with its default kernel, which this one can replace."""
    return (
        metadata.topk_backend.should_use_topk_v2()
        and metadata.topk_transform_method == TopkTransformMethod.PAGED
        and envs.SGLANG_DSA_FUSE_TOPK.get()
        and not metadata.force_unfused_topk
    )


@dataclass(frozen=True)
class SecondTopk:
    """Replacement for SGLang's ``DSATopKBackend`` in one call of ``Indexer._get_topk_ragged``."""

    engine: DSATopKBackend

    def topk_transform(
        self,
        logits: torch.Tensor,
        lengths: torch.Tensor,
        topk: int,
        topk_transform_method: TopkTransformMethod,
        attn_metadata: DSAMetadata,
        row_starts: torch.Tensor,
        batch_idx_list: torch.Tensor | None = None,
        **rest: Any,
    ) -> torch.Tensor:
        """Return ``[T, topk]`` int32 slots; the keywords are those of SGLang's method.

        If the logits are large, SGLang passes their rows in parts, and only the device knows the
        request of each row. With a single request the host knows it too; rows of several requests
        are left to SGLang's default.
        """
        rows, requests = len(logits), len(attn_metadata.page_table_1)
        if batch_idx_list is not None and requests > 1:
            result: torch.Tensor = self.engine.topk_transform(
                logits=logits,
                lengths=lengths,
                topk=topk,
                topk_transform_method=topk_transform_method,
                attn_metadata=attn_metadata,
                row_starts=row_starts,
                batch_idx_list=batch_idx_list,
                **rest,
            )
            return result
        from sglang.kernels.ops.attention.dsa.transform_index import (
            transform_index_page_table_prefill,
        )
        from sglang.kernels.ops.attention.dsv4.topk import topk_transform_ragged_v2

        positions = logits.new_empty((rows, topk), dtype=torch.int32)
        nothing = torch.zeros_like(lengths)
        topk_transform_ragged_v2(
            logits, lengths, out_offsets=nothing, out_indices=positions, row_starts=row_starts
        )
        starts, extend = attn_metadata.cu_seqlens_q, attn_metadata.dsa_extend_seq_lens_list
        if batch_idx_list is not None:  # made on the device: a copy from the host would wait for it
            starts = torch.arange(0, 2 * rows, rows, dtype=torch.int32, device=logits.device)
        slots: torch.Tensor = transform_index_page_table_prefill(
            page_table=attn_metadata.page_table_1,
            topk_indices=positions,
            # These lengths only size the launch. For some of the rows, their number is an upper
            # bound.
            extend_lens_cpu=extend if sum(extend) == rows else [rows],
            cu_seqlens_q=starts,
        )
        return slots
