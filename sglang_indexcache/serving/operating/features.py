"""SGLang's features that sharing combines with, and how each is known to work.

``server doctor`` names those that a server uses, and the table in ``docs/serving.md`` is made of
them. What does not combine is refused in ``serving/refusals.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_indexcache.serving.cpu import platform as platform_cpu
from sglang_indexcache.serving.options import SPLIT_ROWS
from sglang_indexcache.serving.plan import Plan
from sglang_indexcache.serving.refusals import against_row_split, is_fp4

TESTED = "CPU test"
REHEARSED = "rehearsed"
"""SGLang's CUDA code ran it on a CPU, with references in place of kernels (tests/rehearsal)."""
CONTRACT = "source check"
"""Our assumptions are checked against SGLang's source; running it needs a GPU."""
READ = "source read"
"""SGLang's code for it was read together with ours; nothing ran it, and nothing checks it."""
REFUSED = "refused"
"""Neither mode serves it; a test checks the refusal."""

EVIDENCE = (
    f"({TESTED}: the tests serve it on the CPU platform and compare with transformers; "
    f"{REHEARSED}: SGLang's CUDA code ran on a CPU, with references for its kernels; {CONTRACT}: "
    f"what is assumed of SGLang's code holds; {READ}: its code was read)"
)

MTP = ("EAGLE", "NEXTN")
"""Speculation in which the model's own draft layer, with an indexer of its own, proposes tokens."""


@dataclass(frozen=True)
class Feature:
    """One feature of SGLang.

    Attributes:
        flag: how it is switched on; "" if it is on by default.
        static: whether static mode supports it, and with what condition.
        live: the same for live mode.
        known_by: kinds of evidence, the best first.
        in_use: returns whether SGLang's arguments use it.
    """

    name: str
    flag: str
    static: str
    live: str
    known_by: tuple[str, ...]
    in_use: Callable[[Any], bool]


FEATURES = (
    Feature("chunked prefill", "--chunked-prefill-size", "yes", "yes", (TESTED, REHEARSED),
            lambda cfg: (cfg.chunked_prefill_size or 0) > 0),
    Feature("radix cache", "", "yes", "yes, shared within a pattern", (TESTED, REHEARSED),
            lambda cfg: not cfg.disable_radix_cache),
    Feature("mixed batches", "--enable-mixed-chunk", "yes", "yes", (TESTED, REHEARSED),
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
    Feature("CUDA graphs", "", "yes, of decode and of prefill", "no",
            (REHEARSED,),
            lambda cfg: cfg.device == "cuda"),
    Feature("two-batch overlap", "--enable-two-batch-overlap",
            "yes, with --pp-size F at every stage start", "the same", (REHEARSED, CONTRACT),
            lambda cfg: cfg.enable_two_batch_overlap),
    Feature("MTP", "--speculative-algorithm EAGLE or NEXTN",
            "yes, the draft layer keeps its own indexer", "no", (REHEARSED, CONTRACT),
            lambda cfg: cfg.speculative_algorithm in MTP),
    Feature("other speculation", "--speculative-algorithm EAGLE3, NGRAM, ...", "not tried", "no",
            (READ,), lambda cfg: cfg.speculative_algorithm not in (None, *MTP)),
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
            "yes, S layers have their F layer's", "the same", (TESTED, REHEARSED),
            lambda cfg: cfg.enable_return_indexer_topk),
    Feature("decode context parallelism", "--dcp-size", "not tried", "no", (READ,),
            lambda cfg: cfg.dcp_size > 1),
    Feature("HiSparse", "--enable-hisparse", "not tried", "no", (READ,),
            lambda cfg: cfg.enable_hisparse),
    Feature("KV sharding", "--enable-kv-cache-sharding", "not tried", "no", (READ,),
            lambda cfg: cfg.enable_kv_cache_sharding),
    Feature("torch.compile", "--enable-torch-compile", "no", "no", (REFUSED,),
            lambda cfg: cfg.enable_torch_compile),
    Feature("LoRA", "--enable-lora", "not tried", "not tried", (READ,),
            lambda cfg: bool(cfg.enable_lora or cfg.lora_paths)),
    Feature("FP4 KV cache", "--kv-cache-dtype nvfp4", "no", "no", (REFUSED,),
            lambda cfg: is_fp4(cfg.kv_cache_dtype)),
)  # fmt: skip


def describe_features(cfg: Any, plan: Plan) -> list[str]:
    """Return a line for each SGLang feature in use that says how it is known to work."""
    lines = []
    for feature in FEATURES:
        if feature.in_use(cfg):
            support = feature.static if plan.mode == "static" else feature.live
            condition = support.removeprefix("yes").lstrip(", ")
            line = f"{feature.name}: {condition}" if condition else feature.name
            lines.append(f"{line} ({', '.join(feature.known_by)})")
    return [*lines, EVIDENCE]


def describe_row_split(cfg: Any, plan: Plan) -> str:
    """Return text on whether ranks split an indexer's rows, or could; "" if there is one rank."""
    ranks, on_cpu = cfg.tp_size // cfg.attn_dp_size, platform_cpu.is_active()
    if ranks == 1 or plan.split_rows == "off":
        return ""
    if plan.split_rows == "on" or on_cpu:
        return f"each of {ranks} ranks scores its share of a prefill's rows"
    if against := [reason for reason, present in against_row_split(cfg).items() if present]:
        return f"none, beside {'; '.join(against)}"
    return (
        f"none: each of {ranks} ranks runs every indexer for all rows. {SPLIT_ROWS.flag} on lets "
        "each score its share, with the same answers (no node has measured it); it goes neither "
        "with context parallelism nor with two-batch overlap"
    )
