"""Choice of our kernels in place of SGLang's: ``--indexcache-kernels`` and the reasons.

The choice is made once, when the command line is resolved, so that an impossible choice is one
clear error before weights are loaded. Every worker reads the routes from the plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from sglang_indexcache.checkpoint import text_config
from sglang_indexcache.errors import Findings, KernelError, SettingsError
from sglang_indexcache.kernels import dispatch, routes
from sglang_indexcache.kernels.contract import (
    INDEX_DIM,
    INDEXER_HEADS,
    MAX_TOKENS,
    MAX_TOPK,
    ROPE_DIM,
    VALUE_DIM,
    OpName,
)
from sglang_indexcache.kernels.dispatch import ROUTED, Phase
from sglang_indexcache.models import read_field
from sglang_indexcache.serving.options import KERNELS
from sglang_indexcache.serving.plan import Route

REPLACED_ATTENTION = ("fa3", "flashmla_auto", "flashmla_kv", "flashmla_sparse")
"""SGLang's sparse attention kernels that ours can replace."""
ENGINE_TOPK = {2048}
"""Values of ``index_topk`` that SGLang's prefill selection takes
(``sgl_kernel.fast_topk_transform_fused``)."""
HOPPER_HEADS = 64
"""Number of attention heads per GPU of which FlashMLA's sparse kernels take multiples on Hopper."""
TRTLLM_FROM = 10
"""Major compute capability from which TensorRT-LLM's sparse attention runs: Blackwell."""
RECORDED_TOPK = {2048}
"""Values of ``index_topk`` that the records were timed with."""
RECORDED_ATTENTION = {"bfloat16": {"flashmla_sparse"}, "fp8": {"flashmla_kv"}}
"""SGLang's attention kernels that the records timed, by the format of the cache's rows."""
RAW_FP8 = {"tilelang", "trtllm"}
"""Backends with which SGLang stores an FP8 cache without scales, which our kernels cannot read."""


def choose(value: str, cfg: Any, model: Any, machine: dispatch.Machine) -> tuple[Route, ...]:
    """Decide the route of every operation, as ``--indexcache-kernels`` asks.

    Raises:
        SettingsError: an implementation that was asked for by name cannot run an operation.
    """
    if value == "engine":
        return tuple(Route(op, phase, None, "the default") for op, phase in ROUTED)
    try:
        if (overlap := dispatch.stated_overlap(value)) is not None:
            return tuple(_by_record(overlap, cfg, model, machine))
        name, chosen_ops = dispatch.chosen(value)
        dispatch.named(name).check(machine)
        for op, phase in chosen_ops:
            for obstacle in _obstacles(op, phase, cfg, model):
                raise KernelError(f"{op} in {phase}: {obstacle}")
    except KernelError as error:
        raise SettingsError(
            f"{KERNELS.flag} {value}: {error}. Name the operations that shall be ours "
            f"({KERNELS.flag} cuda:sparse_mla-prefill); {KERNELS.flag} engine, the default, leaves "
            "every one to SGLang's kernels."
        ) from None
    return tuple(
        Route(op, phase, name, "asked for")
        if (op, phase) in chosen_ops
        else Route(op, phase, None, "not asked for")
        for op, phase in ROUTED
    )


def _by_record(overlap: int, cfg: Any, model: Any, machine: dispatch.Machine) -> Iterator[Route]:
    """Yield the routes by a card's record; SGLang's kernels if ours cannot run or are not in it."""
    table = routes.Routes.of_card(machine.name, overlap)
    if table is None:
        why = f"no record of {machine.name}"
        yield from (Route(op, phase, None, why) for op, phase in ROUTED)
        return
    ours = dispatch.named(routes.OURS)
    missing = ours.obstacle(machine)
    measured = table.without(routes.OURS) if missing else table
    without = f"; without {ours.name}, which {missing}" if missing else ""
    for op, phase in ROUTED:
        reasons = [*_obstacles(op, phase, cfg, model), *_unlike_record(op, phase, cfg, model)]
        if reasons:
            yield Route(op, phase, None, reasons[0])
            continue
        operation = operation_of(op, phase, cfg, model)
        takes = measured.takes(operation)
        lists = f", lists that share {overlap} %" if operation.name in routes.SIDE_BY_SIDE else ""
        why = f"record of {measured.card}, {operation.heads} heads{lists}{without}"
        if takes <= {routes.ENGINE}:
            found = "nothing was faster" if takes else "no shape was timed"
            yield Route(op, phase, None, f"{found}: {why}")
            continue
        implementation = ours.name if routes.OURS in takes else None
        why = f"{why}: {'; '.join(measured.describe(operation))}"
        yield Route(op, phase, implementation, why, measured.card, overlap)


def operation_of(op: OpName, phase: Phase, cfg: Any, model: Any) -> routes.Operation:
    """Return the operation under which a card's record lists this server's calls."""
    name = f"{op}-{phase}"
    if op == "select":
        verified = (cfg.speculative_num_draft_tokens or 1) if phase == "decode" else 1
        return routes.Operation(name, model.hf_config.index_n_heads, verified=verified)
    return routes.Operation(name, _heads(cfg, model), _cache(cfg))


def _cache(cfg: Any) -> str:
    return "fp8" if cfg.kv_cache_dtype == "fp8_e4m3" else "bfloat16"


def _unlike_record(op: OpName, phase: Phase, cfg: Any, model: Any) -> Iterator[str]:
    """Yield reasons why SGLang runs another kernel than the one that the record timed."""
    topk = read_field(text_config(model.hf_config), "index_topk")
    if topk not in RECORDED_TOPK:
        yield f"lists of {topk} were not timed"
    cache, backend = _cache(cfg), getattr(cfg, f"dsa_{phase}_backend")
    if op == "sparse_mla" and backend not in RECORDED_ATTENTION[cache]:
        yield f"{backend} over a {cache} cache was not timed"
    if op == "select" and cfg.dsa_topk_backend != "sgl-kernel":
        yield f"--dsa-topk-backend {cfg.dsa_topk_backend} was not timed"
    if op == "select" and phase == "prefill" and cache == "fp8" and backend == "flashmla_sparse":
        yield "SGLang runs its faster top-k there by default"


def _obstacles(op: OpName, phase: Phase, cfg: Any, model: Any) -> list[str]:
    """Return every reason why our kernel cannot replace SGLang's."""
    if op == "select":
        reasons = _against_selection(model)
    else:
        backend = cfg.dsa_prefill_backend if phase == "prefill" else cfg.dsa_decode_backend
        reasons = _against_attention(cfg, model, backend)
    # These options spread one request over GPUs, which changes where its rows or keys lie.
    reasons |= {
        "--enable-prefill-cp gives every GPU some rows of a request": cfg.enable_prefill_cp,
        "--dcp-size gives every GPU some tokens of a request": cfg.dcp_size > 1,
        "--enable-kv-cache-sharding moves pages": cfg.enable_kv_cache_sharding,
    }
    return [reason for reason, holds in reasons.items() if holds]


def _against_selection(model: Any) -> dict[str, bool]:
    config, context = model.hf_config, model.context_len
    topk = config.index_topk
    fixed = [getattr(config, name, None) for name in ("index_init_tokens", "index_local_tokens")]
    heads, width = config.index_n_heads, config.index_head_dim
    return {
        f"the indexer has {heads} heads, ours {', '.join(map(str, INDEXER_HEADS))}": (
            heads not in INDEXER_HEADS
        ),
        f"index keys are {width} wide, ours {INDEX_DIM}": width != INDEX_DIM,
        "the model pools its index keys": (getattr(config, "index_kpool", None) or 1) > 1,
        f"the model selects {topk}, ours up to {MAX_TOPK}": not 1 <= topk <= MAX_TOPK,
        "the model always selects some first or last tokens": any(fixed),
        f"a context of {context} tokens, ours takes {MAX_TOKENS} (--context-length)": (
            context > MAX_TOKENS
        ),
    }


def _against_attention(cfg: Any, model: Any, backend: str) -> dict[str, bool]:
    latent, rope, dtype = model.kv_lora_rank, model.qk_rope_head_dim, cfg.kv_cache_dtype
    raw = {cfg.dsa_prefill_backend, cfg.dsa_decode_backend} & RAW_FP8
    return {
        f"it stands in for {', '.join(REPLACED_ATTENTION)}, not for {backend} "
        "(--dsa-prefill-backend, --dsa-decode-backend)": backend not in REPLACED_ATTENTION,
        f"latent rows are {latent} + {rope} wide, ours {VALUE_DIM} + {ROPE_DIM}": (
            (latent, rope) != (VALUE_DIM, ROPE_DIM)
        ),
        f"the model runs in {model.dtype}, ours in bfloat16": model.dtype != torch.bfloat16,
        f"it cannot read a {dtype} cache (--kv-cache-dtype)": (
            dtype not in ("fp8_e4m3", "auto", "bfloat16", "bf16")
        ),
        f"with {' and '.join(sorted(raw))} SGLang stores FP8 rows without scales, which it cannot "
        "read": dtype == "fp8_e4m3" and bool(raw),
        "--enable-hisparse moves the selected rows": cfg.enable_hisparse,
    }


def check_engine(
    routes: tuple[Route, ...], cfg: Any, model: Any, machine: dispatch.Machine
) -> None:
    """Refuse settings with which SGLang's own CUDA kernels would fail at the first prompt.

    Raises:
        SettingsError: has every reason, each with the flag that resolves it.
    """
    if cfg.device != "cuda":
        return
    findings = Findings()
    for reasons in (
        _of_dtype(model),
        _of_topk(routes, cfg, model),
        _of_heads(routes, cfg, model),
        _of_card(routes, cfg, machine),
    ):
        findings.each += [SettingsError(reason) for reason in reasons]
    findings.report()


def _of_dtype(model: Any) -> Iterator[str]:
    if model.dtype == torch.float16:
        yield (
            "the model would run in float16, which DSA's kernels do not take (SGLang chooses it "
            "where config.json says float32, or nothing). Add --dtype bfloat16."
        )


def _of_topk(routes: tuple[Route, ...], cfg: Any, model: Any) -> Iterator[str]:
    config, backend = text_config(model.hf_config), cfg.dsa_prefill_backend
    topk = int(read_field(config, "index_topk") or max(ENGINE_TOPK))
    select = routes[ROUTED.index(("select", "prefill"))]
    is_pooled = (getattr(config, "index_kpool", None) or 1) > 1
    # A prefill that gathers its rows first uses another kernel (``get_topk_transform_method``).
    gathers = backend == "flashmla_sparse_q8" or (
        backend in ("flashmla_sparse", "triton_sparse_mla") and cfg.kv_cache_dtype == "fp8_e4m3"
    )
    if (
        cfg.dsa_topk_backend == "sgl-kernel"
        and select.implementation is None
        and topk not in ENGINE_TOPK
        and not is_pooled
        and not (gathers and topk < max(ENGINE_TOPK))
    ):
        yield (
            f"the model's index_topk is {topk}, and SGLang's kernel that selects in a prefill "
            f"takes {', '.join(map(str, sorted(ENGINE_TOPK)))} only: it would fail at the first "
            f"prompt of more than {topk} tokens. Add --dsa-topk-backend torch."
        )


def _of_heads(routes: tuple[Route, ...], cfg: Any, model: Any) -> Iterator[str]:
    """Yield why ``flashmla_sparse_q8`` cannot run; our backend pads ``flashmla_sparse``."""
    heads = _heads(cfg, model)
    attend = routes[ROUTED.index(("sparse_mla", "prefill"))]
    if (
        attend.implementation is None
        and cfg.dsa_prefill_backend == "flashmla_sparse_q8"
        and heads % HOPPER_HEADS
        and HOPPER_HEADS % heads
    ):
        yield (
            f"each GPU has {heads} attention heads, which SGLang cannot pad to {HOPPER_HEADS} for "
            "--dsa-prefill-backend flashmla_sparse_q8: the first prompt would end the server. Use "
            "flashmla_sparse, for which this plugin pads them."
        )


def _heads(cfg: Any, model: Any) -> int:
    """Return the number of attention heads per GPU, as in SGLang's ``derive_attn_tp_size``."""
    ranks = cfg.tp_size // cfg.attn_dp_size // cfg.attn_cp_size
    return max(1, int(model.num_attention_heads) // ranks)


def _of_card(routes: tuple[Route, ...], cfg: Any, machine: dispatch.Machine) -> Iterator[str]:
    """Yield an error for each attention kernel that was asked for and that the card cannot run."""
    major = machine.capability[0] if machine.capability else 0
    for phase in ("prefill", "decode"):
        backend = getattr(cfg, f"dsa_{phase}_backend")
        route = routes[ROUTED.index(("sparse_mla", phase))]
        if route.implementation is None and backend == "trtllm" and 0 < major < TRTLLM_FROM:
            yield (
                f"--dsa-{phase}-backend trtllm needs a Blackwell GPU, and this is {machine.name}: "
                "the first prompt would end the server. Leave the flag out, and SGLang chooses a "
                "kernel of this GPU's."
            )


def check_reference(routes: tuple[Route, ...], cfg: Any) -> None:
    """Refuse reference kernels in CUDA graphs, because they read lengths on the host.

    Raises:
        SettingsError: graphs are on in a phase with reference kernels.
    """
    graphs = cfg.cuda_graph_config
    with_some = {route.phase for route in routes if route.implementation == "reference"}
    on = [phase for phase in ("decode", "prefill") if graphs[phase].backend != "disabled"]
    if on := [phase for phase in on if phase in with_some]:
        raise SettingsError(
            f"{KERNELS.flag} reference cannot run in CUDA graphs, which are on for "
            f"{' and '.join(on)}. Add "
            f"{' '.join(f'--cuda-graph-backend-{phase} disabled' for phase in on)}."
        )
