"""SGLang's own objects in a process that is no server: its configuration, and pools to write to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from benchmarks.card.claims import need
from benchmarks.children import ROOT
from sglang_indexcache.pattern import Pattern

MODEL = ROOT / "sglang_indexcache" / "demo" / "tiny-dsa"
PATTERN = Pattern.uniform(12, 4)


def resolved(*flags: str) -> Any:
    """SGLang's arguments for the demo's checkpoint under :data:`PATTERN`, through its pipeline.

    Raises:
        MissingError: there is no SGLang here.
    """
    need("sglang.srt.plugins").load_plugins()
    arguments = need("sglang.srt.server_args").prepare_server_args(
        [
            *("--model-path", str(MODEL), "--attention-backend", "indexcache"),
            *("--indexcache-pattern", str(PATTERN), *flags),
        ]
    )
    arguments.resolve_once()
    return arguments


def configuration(arguments: Any) -> tuple[Any, list[str] | None]:
    """The resolved values, and the ``indexer_types`` that the model will be built with."""
    cfg = need("sglang.srt.arg_groups.overrides").resolving_view(arguments)
    return cfg, json.loads(cfg.json_model_override_args).get("indexer_types")


def published(*flags: str) -> Any:
    """Make :func:`resolved` arguments those of this process, as a scheduler of one GPU does."""
    arguments = resolved(*flags)
    context = need("sglang.srt.runtime_context")
    world_rank = context.spawn_world_rank(arguments, tp_rank=0, pp_rank=0)
    ranks = context.SpawnRanks(world_rank=world_rank, dp_rank=None, gpu_id=0)
    context.publish(arguments, role="scheduler", ranks=ranks)
    return arguments


@contextmanager
def pool_in_use(pool: Any) -> Iterator[None]:
    """Layers write to ``pool``."""
    contexts = need("sglang.srt.model_executor.forward_context")
    backend = SimpleNamespace(token_to_kv_pool=pool)
    with contexts.forward_context(contexts.ForwardContext(attn_backend=backend)):
        yield
