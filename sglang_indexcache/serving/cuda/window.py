"""Recent windows in SGLang's CUDA backend: what lists mean there, and who takes them wider.

SGLang's indexer hands on entries that attention reads as they are: pool slots, or in a prefill from
an FP8 cache (RAGGED) offsets into the batch's keys laid end to end. So a window's tokens are named
in the same way. Attention is told how long lists are by each row's length, at most index_topk; with
a window it is told how many entries they have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sglang_indexcache.errors import SettingsError
from sglang_indexcache.recent import Addresses
from sglang_indexcache.recent import widen as widen_reference
from sglang_indexcache.serving.preflight.options import PATTERN

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    from sglang_indexcache.serving.cuda.choice import Route
    from sglang_indexcache.serving.plan import Plan

TAKE_WIDER = ("fa3", "flashmla_sparse")
"""SGLang's attention that takes lists of any length with each row's count. FlashMLA's decode kernel
(``flashmla_kv``) wants exactly index_topk entries; the others have not been looked at."""

MULTIPLE = 128
"""Entries: what FlashMLA's sparse kernel wants lists to be a multiple of; to FA3 it is the same."""


def check(cfg: Any, plan: Plan, routes: tuple[Route, ...], index_kpool: int) -> None:
    """Refuse a window that the server's attention, which is decided, cannot be given.

    Raises:
        SettingsError: every reason, and what to do.
    """
    if not any(pattern.window for pattern in plan.policy.patterns):
        return
    ours = {route.phase for route in routes if route.op == "sparse_mla" and route.implementation}
    asked = {"prefill": cfg.dsa_prefill_backend, "decode": cfg.dsa_decode_backend}
    wide: tuple[str, ...] = TAKE_WIDER
    if not str(cfg.kv_cache_dtype).startswith("fp8"):
        wide += ("flashmla_auto",)  # it chooses flashmla_sparse then
    reasons = {
        f"--dsa-{phase}-backend {name} (take {' or '.join(TAKE_WIDER)}, or --indexcache-kernels)": (
            name not in wide and phase not in ours
        )
        for phase, name in asked.items()
    }
    reasons |= {
        "--speculative-algorithm": cfg.speculative_algorithm is not None,
        "--enable-two-batch-overlap": cfg.enable_two_batch_overlap,
        "--enable-prefill-cp": cfg.enable_prefill_cp,
        "--dcp-size": cfg.dcp_size > 1,
        "--enable-kv-cache-sharding": cfg.enable_kv_cache_sharding,
        "--enable-hisparse": cfg.enable_hisparse,
        "a model that pools its index keys": index_kpool > 1,
    }
    if found := [name for name, present in reasons.items() if present]:
        raise SettingsError(
            f"a recent window ({plan.policy}) does not work with {'; '.join(found)}. Drop what "
            f"stands there, or the window from {PATTERN.flag}."
        )


def widen(
    lists: torch.Tensor,
    windows: torch.Tensor | int,
    width: int,
    batch: ForwardBatch,
    slots: torch.Tensor,
    offsets: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Extend a forward's lists by their rows' windows; return them and their entries' numbers.

    Reads nothing on the host and allocates on the stream's pool, so a graph can capture it.

    Args:
        lists: ``[T, k]`` int32, as SGLang's indexer made them.
        slots: ``[R, L]`` int32, the slot of each token of every request in the pool.
        offsets: ``[>= T]`` where lists hold offsets (RAGGED): where each row's request begins.
    """
    rows = len(lists)
    if offsets is not None:
        addresses = Addresses(offsets=offsets[:rows])
    else:
        addresses = Addresses(table=slots, owners=_owners(batch, rows))
    visible = batch.positions[:rows] + 1
    if lists.is_cuda:
        from sglang_indexcache.kernels.window import widen as kernel

        return kernel(lists, visible, windows, width, addresses, MULTIPLE)
    return widen_reference(lists, visible, windows, width, addresses, MULTIPLE)


def _owners(batch: ForwardBatch, rows: int) -> torch.Tensor:
    """``[rows]``: each row's request in the pool; those that pad a prefill get the last one's."""
    if batch.forward_mode.is_decode_or_idle():
        return batch.req_pool_indices[:rows]
    ends = batch.extend_seq_lens.cumsum(0)
    order = torch.arange(rows, device=ends.device)
    requests = torch.searchsorted(ends, order, right=True).clamp_max(len(ends) - 1)
    return batch.req_pool_indices[requests]
