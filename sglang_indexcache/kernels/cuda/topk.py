"""Exact top-k on Hopper (csrc/topk)."""

import torch

from sglang_indexcache.kernels.checks import check_logits
from sglang_indexcache.kernels.cuda import library, require_hopper


def topk(
    logits: torch.Tensor,
    visible: torch.Tensor,
    topk: int,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """:class:`sglang_indexcache.kernels.contracts.TopK`."""
    check_logits(logits, visible, topk)
    require_hopper("topk", logits.device)
    if out is None:
        out = torch.empty(len(visible), topk, dtype=torch.int32, device=logits.device)
    if len(visible):
        library("topk").topk(logits, visible, out)
    return out
