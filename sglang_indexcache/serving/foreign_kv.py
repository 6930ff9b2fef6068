"""KV that another pattern computed is never taken for this server's own.

Behind the first S layer every latent depends on the pattern, and an S layer has no index keys.
Three ways lead in: a cache that outlives the server or is shared with others (HiCache's storage,
LMCache, external linkers), a storage that is attached while the pattern may change, and a prefill
node that runs another pattern.

SGLang keeps cached prefixes apart by a request's ``extra_key``: it enters the radix cache's key,
the hashes under which pages are stored, and LMCache's salt. So the pattern's namespace goes there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang_indexcache.serving import hooks
from sglang_indexcache.serving.active import current
from sglang_indexcache.serving.settings import Plan

logger = logging.getLogger(__name__)

_KV_MANAGER = "sglang.srt.disaggregation.common.conn.CommonKVManager"
_TAG = "with IndexCache"
_SGLANGS_ADVICE = "the same --kv-cache-dtype value"


def install(plan: Plan) -> None:
    """Hook this process as ``plan`` needs it; safe to call again."""
    from sglang.srt.runtime_context import get_disagg

    if plan.kv_namespace is not None:
        hooks.after("sglang.srt.managers.schedule_batch.Req.__init__", _keep_apart)
    if plan.mode == "live":
        hooks.around(
            "sglang.srt.managers.scheduler.Scheduler.attach_hicache_storage_wrapped",
            _refuse_storage,
        )
    if get_disagg().disaggregation_mode != "null":
        hooks.around(f"{_KV_MANAGER}.__init__", _tell_pattern)
        hooks.around(f"{_KV_MANAGER}.try_ensure_parallel_info", _turn_away)


def _keep_apart(_result: None, request: Any, *_args: Any, **_kwargs: Any) -> None:
    active = current()
    if active is not None and (namespace := active.plan.kv_namespace) is not None:
        request.extra_key = within(namespace, request.extra_key)


def within(namespace: str, extra_key: str | None) -> str:
    """A request's ``extra_key`` inside ``namespace``.

    A decode node sends requests back to a prefill node with the key that they have by then, so a
    key inside the namespace stays as it is.
    """
    if extra_key is None or extra_key == namespace:
        return namespace
    prefix = f"{namespace}|"
    return extra_key if extra_key.startswith(prefix) else prefix + extra_key


def _refuse_storage(_original: Callable[..., Any], _scheduler: Any, _request: Any) -> Any:
    from sglang.srt.managers.io_struct import AttachHiCacheStorageReqOutput

    return AttachHiCacheStorageReqOutput(
        success=False,
        message="in live mode the pattern may change, and stored KV would outlive it. Start the "
        "server in static mode.",
    )


def _tell_pattern(
    original: Callable[..., None], manager: Any, args: Any, *rest: Any, **named: Any
) -> None:
    """Prefill and decode nodes compare the dtype of their KV at the handshake: add the pattern."""
    args.kv_cache_dtype_str += _tag()
    original(manager, args, *rest, **named)


def _tag() -> str:
    """What a node adds to its KV dtype; nothing where stock SGLang computes the same KV."""
    active = current()
    if active is None:
        return ""
    plan = active.plan
    adapter = f" adapter {plan.adapter_digest[:12]}" if plan.adapter else ""
    if plan.mode == "live":
        return f" {_TAG} in live mode{adapter}"
    return f" {_TAG} pattern {plan.pattern}{adapter}" if plan.kv_namespace else ""


def _turn_away(original: Callable[..., bool], manager: Any, address: str) -> bool:
    """Fail the requests of a prefill node that does not fit; SGLang would end this server."""
    try:
        return original(manager, address)
    except RuntimeError as error:
        if _TAG not in str(error):
            raise
        reason = str(error).replace(_SGLANGS_ADVICE, f"{_SGLANGS_ADVICE} and the same pattern")
        logger.error("IndexCache: nothing is taken from the prefill node %s: %s", address, reason)
        return False
