"""Which SGLang features combine with IndexCache, and how that is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

TESTED = "CPU test"
REHEARSED = "rehearsed"
"""SGLang's CUDA code ran it on a CPU, references in the place of kernels (tests/rehearsal)."""
CONTRACT = "source check"
"""Our assumptions are checked against SGLang's source; running it needs a GPU."""


@dataclass(frozen=True)
class Feature:
    """One feature of the engine.

    Attributes:
        name: what users call it.
        flag: how it is switched on; "" if it is on by default.
        static: whether static mode supports it, and with what condition.
        live: the same for live mode.
        known_by: how we know, the best first.
        in_use: whether a resolved configuration uses it.
    """

    name: str
    flag: str
    static: str
    live: str
    known_by: tuple[str, ...]
    in_use: Callable[[Any], bool]

    @property
    def evidence(self) -> str:
        """How we know, as text."""
        return ", ".join(self.known_by)


FEATURES = (
    Feature("chunked prefill", "--chunked-prefill-size", "yes", "yes", (TESTED, REHEARSED),
            lambda cfg: (cfg.chunked_prefill_size or 0) > 0),
    Feature("radix cache", "", "yes", "yes, shared within a pattern", (TESTED, REHEARSED),
            lambda cfg: not cfg.disable_radix_cache),
    Feature("mixed batches", "--enable-mixed-chunk", "yes", "yes", (TESTED,),
            lambda cfg: cfg.enable_mixed_chunk),
    Feature("overlap schedule", "", "yes", "yes", (TESTED, REHEARSED),
            lambda cfg: not cfg.disable_overlap_schedule),
    Feature("tensor parallelism", "--tp", "yes", "yes", (TESTED, REHEARSED),
            lambda cfg: cfg.tp_size > 1),
    Feature("dp_attention", "--enable-dp-attention", "yes", "yes", (TESTED, REHEARSED),
            lambda cfg: cfg.attn_dp_size > 1),
    Feature("pipeline parallelism", "--pp-size", "yes",
            "patterns with F at every stage start", (TESTED, REHEARSED),
            lambda cfg: cfg.pp_size > 1),
    Feature("FP8 KV cache", "--kv-cache-dtype fp8_e4m3", "yes", "yes", (REHEARSED,),
            lambda cfg: cfg.kv_cache_dtype.startswith("fp8")),
    Feature("FP8 weights", "", "yes", "yes", (TESTED, REHEARSED),
            lambda cfg: cfg.quantization == "fp8"),
    Feature("CUDA graphs", "", "yes, of decode and of prefill", "decode, with --indexcache-graphs",
            (REHEARSED,),
            lambda cfg: cfg.device == "cuda"),
    Feature("two-batch overlap", "--enable-two-batch-overlap",
            "yes, with --pp-size F at every stage start", "the same", (REHEARSED, CONTRACT),
            lambda cfg: cfg.enable_two_batch_overlap),
    Feature("MTP / EAGLE", "--speculative-algorithm",
            "yes, the draft layer keeps its own indexer", "no", (REHEARSED, CONTRACT),
            lambda cfg: cfg.speculative_algorithm is not None),
    Feature("prefill context parallelism", "--enable-prefill-cp",
            "yes, with --cp-strategy interleave", "no", (REHEARSED, CONTRACT),
            lambda cfg: cfg.enable_prefill_cp),
    Feature("disaggregation", "--disaggregation-mode", "yes, the same pattern on both sides",
            "live on both sides with the same default, switch when idle", (REHEARSED, CONTRACT),
            lambda cfg: cfg.disaggregation_mode != "null"),
    Feature("HiCache", "--enable-hierarchical-cache",
            "yes, stored pages are kept apart by pattern", "the same", (REHEARSED, CONTRACT),
            lambda cfg: cfg.enable_hierarchical_cache),
    Feature("returned selections", "--enable-return-indexer-topk",
            "yes, S layers have their F layer's", "the same", (TESTED,),
            lambda cfg: cfg.enable_return_indexer_topk),
)  # fmt: skip
