"""KV that another pattern computed is never taken for this server's own.

Behind the first S layer every latent depends on the pattern, and an S layer has no index keys.
SGLang keeps cached prefixes apart by a request's ``extra_key``: it enters the radix cache's key,
the hashes under which pages are stored, and LMCache's salt. So the namespace of the request's
pattern goes there, when the request is admitted (``requests.py``). That leaves one way in, which is
closed here: a prefill node that runs another pattern.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang_indexcache.serving import hooks
from sglang_indexcache.serving.active import current

logger = logging.getLogger(__name__)

_KV_MANAGER = "sglang.srt.disaggregation.common.conn.CommonKVManager"
_TAG = "with IndexCache"
_SGLANGS_ADVICE = "the same --kv-cache-dtype value"


def install() -> None:
    """Hook this process if it is one of two nodes; safe to call again."""
    from sglang.srt.runtime_context import get_disagg

    if get_disagg().disaggregation_mode != "null":
        hooks.around(f"{_KV_MANAGER}.__init__", _tell_pattern)
        hooks.around(f"{_KV_MANAGER}.try_ensure_parallel_info", _turn_away)


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
    apart = plan.kv_namespace(plan.pattern, adapted=bool(plan.adapter))
    return f" {_TAG} pattern {plan.pattern}{adapter}" if apart else ""


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
