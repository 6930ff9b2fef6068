"""Refusal of SGLang features that a plan does not go with, before weights are loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sglang_indexcache.errors import Findings, SettingsError
from sglang_indexcache.models import BY_ARCHITECTURE
from sglang_indexcache.serving.cpu import platform as platform_cpu
from sglang_indexcache.serving.options import (
    ADAPTER,
    KERNELS,
    MODE,
    PATTERN,
    SPLIT_ROWS,
    not_together,
    other_backends,
)
from sglang_indexcache.serving.plan import BACKEND_NAME, Plan


def is_fp4(kv_cache_dtype: str | None) -> bool:
    """Return whether a KV cache is of FP4 rows."""
    return "fp4" in (kv_cache_dtype or "")


def check(cfg: Any, plan: Plan, num_layers: int) -> None:
    """Refuse flags that would fail later, or would silently give wrong answers.

    Args:
        cfg: SGLang's resolving view of the server's arguments.
        num_layers: number of the model's layers, including those without an indexer.

    Raises:
        IndexCacheError: has every reason, and what to do.
    """
    findings = Findings()
    findings.each += [SettingsError(reason) for reason in _reasons(cfg, plan)]
    # In live mode and under two-batch overlap SGLang carries no indices, so it has none to pass to
    # the next stage.
    carries = BY_ARCHITECTURE[plan.architecture].hands_on and plan.mode == "static"
    if not carries or cfg.enable_two_batch_overlap:
        starts = stage_starts(plan.layer_ids, num_layers, cfg.pp_size)
        with findings:
            for pattern in plan.policy.patterns:
                pattern.check_stages(starts)
    findings.report()


def _reasons(cfg: Any, plan: Plan) -> Iterator[str]:
    yield from _of_platform(plan)
    if others := other_backends(cfg):
        yield not_together(f"--attention-backend {BACKEND_NAME}", others)
    if cfg.use_ray:
        yield (
            "IndexCache does not work with --use-ray: SGLang loads no plugins in Ray's scheduler "
            "actors, where layers would be built without it. Drop the flag."
        )
    if cfg.enable_pdmux:  # SGLang calls a method that only dense and Qwen models have
        yield (
            "--enable-pdmux does not work with models of sparse attention: SGLang cannot "
            "run their prefill in pieces, and the first request would end the server. Drop it."
        )
    if cfg.enable_prefill_cp and cfg.cp_strategy == "zigzag":
        yield (
            "--cp-strategy zigzag does not work with models of DeepSeek Sparse Attention: SGLang "
            "gathers their index keys in interleaved order only, and the first request would end "
            "the server. Use --cp-strategy interleave."
        )
    if is_fp4(cfg.kv_cache_dtype):
        yield (
            f"--kv-cache-dtype {cfg.kv_cache_dtype} is not served: the layouts of bfloat16 and FP8 "
            "caches are the ones that IndexCache was tested with. Use auto or fp8_e4m3."
        )
    if cfg.enable_torch_compile:
        yield (
            "--enable-torch-compile is not served: it compiles the layers' code in which indices "
            "are shared, and nobody has run that. Drop the flag; CUDA graphs work without it."
        )
    if plan.mode == "live":
        yield from _of_live_mode(cfg, plan)
    if plan.split_rows == "on":
        yield from _clash(f"{SPLIT_ROWS.flag} on", against_row_split(cfg), "Drop it.")
    yield from _of_caches(cfg, plan)
    if cfg.enable_return_indexer_topk:
        yield from _of_returned_selections(cfg)


def _clash(what: str, reasons: Mapping[str, Any], fix: str) -> Iterator[str]:
    """Yield one sentence with all ``reasons`` that are true, if there are any."""
    if causes := [name for name, present in reasons.items() if present]:
        yield f"{what} does not work with {'; '.join(causes)}. {fix}"


def _of_platform(plan: Plan) -> Iterator[str]:
    from sglang.srt.platforms import current_platform

    if current_platform.is_rocm():
        if plan.mode == "live":
            yield (
                "live mode does not work on AMD GPUs: SGLang writes the index keys of F and S "
                f"layers with different quantisers there. Use {MODE.flag} static."
            )
        if plan.kernels != "engine":
            yield (
                f"{KERNELS.flag} {plan.kernels} does not work on AMD GPUs: our kernels read index "
                "keys in the layout of NVIDIA's. Drop the flag."
            )
    elif not (current_platform.is_cuda() or platform_cpu.is_active()):
        yield (
            f"IndexCache does not serve on this platform ({current_platform.device_name}): SGLang "
            "has another attention backend for it, in which nothing would be shared. It serves on "
            "NVIDIA GPUs, on AMD GPUs in static mode, and for reference on a CPU."
        )


def _of_live_mode(cfg: Any, plan: Plan) -> Iterator[str]:
    """Refuse everything but plain prefill and decode: SGLang stores live keys on no other path."""
    reasons = {
        "--speculative-algorithm": cfg.speculative_algorithm is not None,
        "--enable-prefill-cp": cfg.enable_prefill_cp,
        "--dcp-size": cfg.dcp_size > 1,
        "--enable-hisparse": cfg.enable_hisparse,
        "--enable-kv-cache-sharding": cfg.enable_kv_cache_sharding,
        f"{ADAPTER.flag}, whose indexers are trained for one pattern": plan.adapter,
        f"a {plan.architecture}": not BY_ARCHITECTURE[plan.architecture].live,
    }
    yield from _clash("live mode", reasons, f"Use {MODE.flag} static.")
    for phase in ("prefill", "decode"):
        backend = _graph_backend(cfg, phase)
        if backend not in (None, "disabled"):
            yield (
                f"live mode does not work with {phase} graphs ({backend}), which would replay the "
                f"pattern that they were captured with. Drop --cuda-graph-backend-{phase}, and the "
                f"{phase} backend in --cuda-graph-config."
            )


def _graph_backend(cfg: Any, phase: str) -> str | None:
    """Return the graph backend that was asked for; SGLang may have parsed the flag to an object."""
    config = cfg.cuda_graph_config or {}
    phases = config if isinstance(config, dict) else config.to_dict()
    backend: str | None = phases.get(phase, {}).get("backend")
    return backend or getattr(cfg, f"cuda_graph_backend_{phase}")


def _of_caches(cfg: Any, plan: Plan) -> Iterator[str]:
    """Refuse a cache that ignores a request's key, because it would return another pattern's KV."""
    by_tokens_alone = {
        "--enable-flexkv": cfg.enable_flexkv,
        "--radix-cache-backend flexkv": cfg.radix_cache_backend == "flexkv",
    }
    if plan.kv_apart:
        cause = f"{MODE.flag} live" if plan.mode == "live" else PATTERN.flag
        fix = (
            "FlexKV finds KV by its tokens alone and would hand out what another pattern "
            "computed. Drop one of them, or use HiCache or LMCache."
        )
        yield from _clash(cause, by_tokens_alone, fix)


def _of_returned_selections(cfg: Any) -> Iterator[str]:
    """Refuse to return selections if no single worker has all: SGLang returns one's record."""
    reasons = {
        "--enable-two-batch-overlap, where both halves of a batch are recorded in the same rows": (
            cfg.enable_two_batch_overlap
        ),
        "--pp-size, where each stage records its own layers and only the last one answers": (
            cfg.pp_size > 1
        ),
        "--disaggregation-mode, where the node that answers did not prefill": (
            cfg.disaggregation_mode != "null"
        ),
        "attention that is split over GPUs (--tp-size above --attn-dp-size)": (
            cfg.tp_size > cfg.attn_dp_size
        ),
    }
    yield from _clash("--enable-return-indexer-topk", reasons, "Drop it.")


def against_row_split(cfg: Any) -> dict[str, bool]:
    """Return every reason why ranks cannot split rows, and whether it holds."""
    from sglang.srt.platforms import current_platform

    return {
        "one rank a replica, which has all rows (--tp-size is --attn-dp-size)": (
            cfg.tp_size == cfg.attn_dp_size
        ),
        "--enable-prefill-cp, which has dealt out the rows already": cfg.enable_prefill_cp,
        f"--dcp-size {cfg.dcp_size}, which deals out the keys": cfg.dcp_size > 1,
        "--enable-two-batch-overlap, between whose halves nobody has run a gather": (
            cfg.enable_two_batch_overlap
        ),
        "--enable-hisparse, which moves what is selected": cfg.enable_hisparse,
        "--enable-kv-cache-sharding, where ranks read keys together": cfg.enable_kv_cache_sharding,
        "whole prefill graphs, which would replay the rows of their capture": (
            _graph_backend(cfg, "prefill") == "full"
        ),
        "AMD GPUs, where nobody has run it": current_platform.is_rocm(),
    }


def check_pooled_keys(plan: Plan, config: Any) -> None:
    """Refuse the row split for pooled keys, because SGLang has another indexer for such models.

    Raises:
        SettingsError: the row split was asked for, and ``config``, the text model's, pools its
            keys.
    """
    if plan.split_rows == "on" and (getattr(config, "index_kpool", None) or 1) > 1:
        raise SettingsError(
            f"{SPLIT_ROWS.flag} on does not work with a model that pools its index keys: SGLang "
            "has another indexer for it. Drop it."
        )


def stage_starts(layer_ids: Sequence[int], num_layers: int, stages: int) -> list[int]:
    """Return the pattern position of each later pipeline stage's first indexer layer."""
    from sglang.srt.distributed.utils import get_pp_indices

    starts = [get_pp_indices(num_layers, rank, stages)[0] for rank in range(1, stages)]
    positions = {sum(layer < start for layer in layer_ids) for start in starts}
    return sorted(positions - {len(layer_ids)})  # a stage may have no indexer at all


def stage_starts_here(plan: Plan) -> list[int]:
    """Return :func:`stage_starts` for the server of this process."""
    from sglang.srt.runtime_context import get_parallel

    return stage_starts(plan.layer_ids, plan.layer_ids[-1] + 1, get_parallel().pp_size)
