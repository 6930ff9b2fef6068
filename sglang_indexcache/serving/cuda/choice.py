"""Which operations our kernels take over from SGLang's: ``--indexcache-kernels`` and the reasons.

Decided twice from the same facts: when the command line is resolved, so that what cannot run is
one clear error before weights are loaded, and in every worker that runs the kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from sglang_indexcache.errors import KernelError, SettingsError
from sglang_indexcache.kernels import dispatch
from sglang_indexcache.kernels.contract import (
    INDEX_DIM,
    INDEXER_HEADS,
    MAX_TOKENS,
    MAX_TOPK,
    ROPE_DIM,
    VALUE_DIM,
    OpName,
)
from sglang_indexcache.kernels.sparse_mla.cuda import TILE_ROWS
from sglang_indexcache.serving.settings import KERNELS

Phase: TypeAlias = Literal["prefill", "decode"]
ROUTED: tuple[tuple[OpName, Phase], ...] = (
    ("select", "prefill"),
    ("select", "decode"),
    ("sparse_mla", "prefill"),
    ("sparse_mla", "decode"),
)
REPLACED_ATTENTION = ("fa3", "flashmla_auto", "flashmla_kv", "flashmla_sparse")
"""SGLang's sparse attention kernels in whose place ours can be called."""
RAW_FP8 = ("tilelang", "trtllm")
"""Those with which SGLang stores an FP8 cache without scales, a layout that ours does not read."""


@dataclass(frozen=True)
class Route:
    """What runs one operation of a server, and why: ours, or None for the engine's kernel.

    Attributes:
        tokens: of context from which ours runs; with fewer it is the engine's.
    """

    op: OpName
    phase: Phase
    implementation: dispatch.Implementation | None
    why: str
    tokens: int = 0

    def __str__(self) -> str:
        name = self.implementation.name if self.implementation else "engine"
        shorter = f"; the engine's below {self.tokens} tokens" if self.tokens else ""
        return f"{self.op} in {self.phase}: {name} ({self.why}{shorter})"


def choose(asked: str, cfg: Any, model: Any, machine: dispatch.Machine) -> tuple[Route, ...]:
    """Decide every operation that can be routed.

    Args:
        asked: "engine", "auto" or an implementation's name.
        cfg: SGLang's resolved configuration.
        model: SGLang's ModelConfig.
        machine: where the server runs.

    Raises:
        SettingsError: an implementation asked for by name cannot take over an operation.
    """
    if asked == "engine":
        return tuple(Route(op, phase, None, "the default") for op, phase in ROUTED)
    routes = []
    for op, phase in ROUTED:
        obstacle = next(_obstacles(op, phase, cfg, model), None)
        try:
            if asked == "auto":
                obstacle = obstacle or _forecast_loss(op, phase, cfg, model, machine)
                best, why = _automatic(op, machine, obstacle)
                routes.append(Route(op, phase, best, why, _faster_from(op, phase, best, model)))
            elif obstacle:
                raise KernelError(f"{op} in {phase}: {obstacle}")
            else:
                named = dispatch.named(asked).check(op, machine)
                routes.append(Route(op, phase, named, "asked for"))
        except KernelError as error:
            raise SettingsError(
                f"{KERNELS.flag} {asked}: {error}. {KERNELS.flag} auto leaves what ours cannot do "
                "to SGLang's kernels."
            ) from None
    return tuple(routes)


def _automatic(
    op: OpName, machine: dispatch.Machine, obstacle: str | None
) -> tuple[dispatch.Implementation | None, str]:
    """The best of ours that is meant to serve."""
    trusted = (one for one in dispatch.running(op, machine) if one.doubt(machine) is None)
    best = next(trusted)  # the reference at the least
    if obstacle or not best.is_reference:
        name, record = dispatch.MEASURED.get((op, machine.capability), ("", ""))
        why = f"measured: benchmarks/results/{record}" if name == best.name else "opted in"
        return (None, obstacle) if obstacle else (best, why)
    ours = (one for one in dispatch.IMPLEMENTATIONS if not one.is_reference)
    reasons = [f"{one.name}: {one.obstacle(op, machine) or one.doubt(machine)}" for one in ours]
    return None, f"none of ours can run on {machine.name}: {', '.join(reasons)}"


def _forecast_loss(
    op: OpName, phase: Phase, cfg: Any, model: Any, machine: dispatch.Machine
) -> str | None:
    """Why the engine's kernel is the faster one by our own forecast; asked for by name, ours run.

    What is so at every length: :func:`_faster_from` has the rule by length. A measurement
    (``dispatch.MEASURED``) overrules it.
    """
    if (op, machine.capability) in dispatch.MEASURED or machine.capability != (9, 0):
        return None
    heads = model.num_attention_heads * cfg.attn_dp_size * cfg.attn_cp_size // cfg.tp_size
    if (op, phase) == ("sparse_mla", "prefill") and heads > TILE_ROWS // 2:
        return (
            f"with {heads} heads on a GPU no two rows share a tile, which is what ours would gain "
            "from, and FlashMLA is forecast to be faster (docs/kernels.md)"
        )
    indexer = model.hf_config.index_n_heads
    if (op, phase) == ("select", "prefill") and indexer not in dispatch.FASTER_FROM:
        return f"no forecast says that ours is faster with {indexer} indexer heads"
    return None


def _faster_from(op: OpName, phase: Phase, best: dispatch.Implementation | None, model: Any) -> int:
    """Tokens from which the best of ours is worth taking."""
    if best is None or (op, phase, best.name) != ("select", "prefill", "cuda"):
        return 0
    return dispatch.FASTER_FROM.get(model.hf_config.index_n_heads, 0)


def _obstacles(op: OpName, phase: Phase, cfg: Any, model: Any) -> Iterator[str]:
    """Every reason why ours cannot stand in for SGLang's kernel."""
    if op == "select":
        yield from _selection_obstacles(model)
    else:
        prefill, decode = cfg.dsa_prefill_backend, cfg.dsa_decode_backend
        yield from _attention_obstacles(cfg, model, prefill if phase == "prefill" else decode)
    # Ways to spread one request over GPUs that change where its rows or keys lie.
    if cfg.enable_prefill_cp:
        yield "--enable-prefill-cp gives every GPU some rows of a request"
    if cfg.dcp_size > 1:
        yield "--dcp-size gives every GPU some tokens of a request"
    if cfg.enable_kv_cache_sharding:
        yield "--enable-kv-cache-sharding moves pages"
    if cfg.enable_pdmux:
        yield "--enable-pdmux gives decode a part of the multiprocessors, and ours count on all"


def _selection_obstacles(model: Any) -> Iterator[str]:
    config = model.hf_config
    heads = config.index_n_heads
    if heads not in INDEXER_HEADS:
        yield f"the indexer has {heads} heads, ours {', '.join(map(str, INDEXER_HEADS))}"
    if config.index_head_dim != INDEX_DIM:
        yield f"index keys are {config.index_head_dim} wide, ours {INDEX_DIM}"
    if not 1 <= config.index_topk <= MAX_TOPK:
        yield f"the model selects {config.index_topk}, ours up to {MAX_TOPK}"
    if (getattr(config, "index_kpool", None) or 1) > 1:
        yield "the model pools its index keys"
    if any(getattr(config, name, None) for name in ("index_init_tokens", "index_local_tokens")):
        yield "the model always selects some first or last tokens"
    if model.context_len > MAX_TOKENS:
        yield (
            f"a context of {model.context_len} tokens, ours takes {MAX_TOKENS} (--context-length)"
        )


def _attention_obstacles(cfg: Any, model: Any, backend: str) -> Iterator[str]:
    if backend not in REPLACED_ATTENTION:
        yield (
            f"it stands in for {', '.join(REPLACED_ATTENTION)}, not for {backend} "
            "(--dsa-prefill-backend, --dsa-decode-backend)"
        )
    latent, rope, dtype = model.kv_lora_rank, model.qk_rope_head_dim, cfg.kv_cache_dtype
    if (latent, rope) != (VALUE_DIM, ROPE_DIM):
        yield f"latent rows are {latent} + {rope} wide, ours {VALUE_DIM} + {ROPE_DIM}"
    if model.dtype != torch.bfloat16:
        yield f"the model runs in {model.dtype}, ours in bfloat16"
    if dtype not in ("fp8_e4m3", "auto", "bfloat16", "bf16"):
        yield f"it cannot read a {dtype} cache (--kv-cache-dtype)"
    raw = [name for name in RAW_FP8 if name in (cfg.dsa_prefill_backend, cfg.dsa_decode_backend)]
    if dtype == "fp8_e4m3" and raw:
        yield f"with {raw[0]} SGLang stores FP8 rows without scales, which it cannot read"
    if cfg.enable_hisparse:
        yield "--enable-hisparse moves the selected rows"


def check_reference(asked: str, cfg: Any) -> None:
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
