"""Exact top-k on Hopper (csrc/topk)."""

import torch

from sglang_indexcache.kernels.checks import check_logits, output
from sglang_indexcache.kernels.cuda import library


def prepare() -> None:
    """Compile and load the library of the op below."""
    library("topk")


def topk(
    logits: torch.Tensor,
    visible: torch.Tensor,
    topk: int,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """:class:`sglang_indexcache.kernels.contract.TopK`."""
    check_logits(logits, visible, topk)
    out = output("topk", out, (len(visible), topk), torch.int32, logits.device)
    if len(visible):
        library("topk").topk(logits, visible, out)
    return out
