"""Which operations our kernels take over from SGLang's: ``--indexcache-kernels`` and the reasons.

Decided twice from the same facts: when the command line is resolved, so that what cannot run is
one clear error before weights are loaded, and in every worker that runs the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sglang_indexcache.errors import KernelError, SettingsError
from sglang_indexcache.kernels.contract import (
    INDEX_DIM,
    INDEXER_HEADS,
    MAX_TOKENS,
    MAX_TOPK,
    ROPE_DIM,
    VALUE_DIM,
    OpName,
)
from sglang_indexcache.kernels.dispatch import (
    ORDER,
    Implementation,
    Machine,
    Shape,
    decide,
    require,
)
from sglang_indexcache.serving.settings import KERNELS, Kernels

SELECTIONS: tuple[OpName, ...] = ("indexer_select_prefill", "indexer_select_decode")
ATTENTIONS: tuple[OpName, ...] = ("sparse_mla_prefill", "sparse_mla_decode")

REPLACED_ATTENTION = ("fa3", "flashmla_auto", "flashmla_kv", "flashmla_sparse")
"""SGLang's sparse attention kernels in whose place ours can be called."""
RAW_FP8 = ("tilelang", "trtllm")
"""Those with which SGLang stores an FP8 cache without scales, a layout that ours does not read."""


@dataclass(frozen=True)
class Route:
    """What runs one operation of a server.

    Attributes:
        op: the operation.
        implementation: which of ours, or None for the engine's kernel.
        why: in a few words.
    """

    op: OpName
    implementation: Implementation | None
    why: str

    def __str__(self) -> str:
        return f"{self.op}: {self.implementation or 'engine'} ({self.why})"


def choose(asked: Kernels, cfg: Any, model: Any, machine: Machine) -> tuple[Route, ...]:
    """Decide every operation that can be routed.

    Args:
        asked: what the user wants.
        cfg: SGLang's resolved configuration.
        model: SGLang's ModelConfig.
        machine: where the server runs.

    Raises:
        SettingsError: an implementation asked for by name cannot take over an operation.
    """
    if asked == "engine":
        return tuple(Route(op, None, "the default") for op in (*SELECTIONS, *ATTENTIONS))
    cache = torch.uint8 if cfg.kv_cache_dtype == "fp8_e4m3" else torch.bfloat16
    select = Shape(heads=model.hf_config.index_n_heads, topk=model.hf_config.index_topk)
    attend = Shape(cache=cache)
    backends = {
        "sparse_mla_prefill": cfg.dsa_prefill_backend,
        "sparse_mla_decode": cfg.dsa_decode_backend,
    }
    obstacle = selection_obstacle(cfg, model)
    routes = [_route(asked, op, obstacle, machine, select) for op in SELECTIONS]
    for op in ATTENTIONS:
        obstacle = attention_obstacle(cfg, model, backends[op])
        routes.append(_route(asked, op, obstacle, machine, attend))
    return tuple(routes)


def _route(
    asked: Kernels, op: OpName, obstacle: str | None, machine: Machine, shape: Shape
) -> Route:
    if asked == "auto":
        return Route(op, None, obstacle) if obstacle else _automatic(op, machine, shape)
    assert asked != "engine"
    try:
        if obstacle:
            raise KernelError(f"{op}: {obstacle}")
        require(op, asked, machine, shape)
    except KernelError as error:
        raise SettingsError(
            f"{KERNELS.flag} {asked}: {error}. {KERNELS.flag} auto leaves what ours cannot do to "
            "SGLang's kernels."
        ) from None
    return Route(op, asked, "asked for")


def _automatic(op: OpName, machine: Machine, shape: Shape) -> Route:
    """What was measured to be faster here, else the best of ours that is meant to serve."""
    decision = decide(op, machine, shape)
    for name in ORDER:
        if name == decision.default:
            return Route(op, name, decision.why)
    if decision.opt_in != "reference":
        return Route(op, decision.opt_in, "opted in")
    reasons = ", ".join(f"{v.implementation}: {v.why}" for v in decision.verdicts if not v.runs)
    return Route(op, None, f"none of ours can run on {machine.name}: {reasons}")


def selection_obstacle(cfg: Any, model: Any) -> str | None:
    """Why our indexer cannot stand in for SGLang's, or None."""
    config = model.hf_config
    pooled, forced = _get(config, "index_kpool", 1), _get(config, "index_init_tokens", 0)
    forced += _get(config, "index_local_tokens", 0)
    return _first(
        (
            config.index_n_heads not in INDEXER_HEADS,
            f"the indexer has {config.index_n_heads} heads, ours {_numbers(INDEXER_HEADS)}",
        ),
        (
            config.index_head_dim != INDEX_DIM,
            f"index keys are {config.index_head_dim} wide, ours {INDEX_DIM}",
        ),
        (
            not 1 <= config.index_topk <= MAX_TOPK,
            f"the model selects {config.index_topk}, ours up to {MAX_TOPK}",
        ),
        (pooled > 1, "the model pools its index keys"),
        (forced > 0, "the model always selects some first or last tokens"),
        (
            model.context_len > MAX_TOKENS,
            f"a context of {model.context_len} tokens, ours takes {MAX_TOKENS} (--context-length)",
        ),
        *_distribution(cfg),
    )


def attention_obstacle(cfg: Any, model: Any, backend: str) -> str | None:
    """Why our sparse attention cannot stand in for ``backend``, or None."""
    fp8 = cfg.kv_cache_dtype == "fp8_e4m3"
    widths = (model.kv_lora_rank, model.qk_rope_head_dim)
    raw = [name for name in RAW_FP8 if name in (cfg.dsa_prefill_backend, cfg.dsa_decode_backend)]
    return _first(
        (
            backend not in REPLACED_ATTENTION,
            f"it stands in for {', '.join(REPLACED_ATTENTION)}, not for {backend} "
            "(--dsa-prefill-backend, --dsa-decode-backend)",
        ),
        (
            widths != (VALUE_DIM, ROPE_DIM),
            f"latent rows are {widths[0]} + {widths[1]} wide, ours {VALUE_DIM} + {ROPE_DIM}",
        ),
        (model.dtype != torch.bfloat16, f"the model runs in {model.dtype}, ours in bfloat16"),
        (
            not fp8 and cfg.kv_cache_dtype not in ("auto", "bfloat16", "bf16"),
            f"it cannot read a {cfg.kv_cache_dtype} cache (--kv-cache-dtype)",
        ),
        (
            fp8 and bool(raw),
            f"with {''.join(raw[:1])} SGLang stores FP8 rows without scales, which it cannot read",
        ),
        (cfg.enable_hisparse, "--enable-hisparse moves the selected rows"),
        *_distribution(cfg),
    )


def check_reference(asked: Kernels, cfg: Any) -> None:
    """The references read lengths on the host, which a captured graph cannot do.

    Raises:
        SettingsError: CUDA graphs are on.
    """
    graphs = cfg.cuda_graph_config
    on = [phase for phase in ("decode", "prefill") if graphs[phase].backend != "disabled"]
    if asked == "reference" and on:
        raise SettingsError(
            f"{KERNELS.flag} reference cannot run in CUDA graphs, which are on for "
            f"{' and '.join(on)}. Add "
            f"{' '.join(f'--cuda-graph-backend-{phase} disabled' for phase in on)}."
        )


def _distribution(cfg: Any) -> tuple[tuple[bool, str], ...]:
    """Ways to spread one request over GPUs that change where its rows or keys lie."""
    return (
        (cfg.enable_prefill_cp, "--enable-prefill-cp gives every GPU some rows of a request"),
        (cfg.dcp_size > 1, "--dcp-size gives every GPU some tokens of a request"),
        (cfg.enable_kv_cache_sharding, "--enable-kv-cache-sharding moves pages"),
    )


def _first(*findings: tuple[bool, str]) -> str | None:
    return next((why for found, why in findings if found), None)


def _get(config: Any, name: str, default: int) -> int:
    return getattr(config, name, None) or default


def _numbers(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))
