"""Agreement on one plan among a server's ranks, and among prefill and decode nodes.

Every node resolves its own settings. Before ranks load weights, they exchange their plans through
the store with which they formed their group. A collective operation would hang, because a rank
without the plugin never joins it.
"""

from __future__ import annotations

import json
import logging
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from sglang_indexcache.errors import SettingsError
from sglang_indexcache.serving import hooks
from sglang_indexcache.serving.adapters import loading
from sglang_indexcache.serving.options import collect
from sglang_indexcache.serving.plan import BACKEND_NAME, Plan
from sglang_indexcache.serving.process import current, published_plan

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

logger = logging.getLogger(__name__)

PATIENCE = timedelta(minutes=2)
"""Longest wait of a rank for the others' plans. All ranks have just formed their group."""

_BOOTSTRAP = "sglang.srt.distributed.bootstrap"
_NOTHING = "no IndexCache"


def install() -> None:
    """Make ranks compare their plans once they have formed their group."""
    if _BOOTSTRAP in sys.modules:  # else no group will form, and importing it would slow the start
        hooks.after("sglang.srt.distributed.bootstrap.init_parallel_runtime", _look, at_start=True)


def _look(_result: None, *, server_args: Any, **_: Any) -> None:
    import torch.distributed as dist

    plan = published_plan()
    if plan is None and (request := _asked_for(server_args)):
        raise unresolved(request)
    world = dist.group.WORLD
    assert world is not None, "the function that has just returned makes it"
    if world.size() > 1:
        agree(plan, world.rank(), world.size(), world.get_group_store())
    if plan is not None:
        loading.install(plan)


def _asked_for(server_args: Any) -> str:
    """Return the setting that asks for IndexCache in a process without a plan, or ""."""
    from sglang.srt.arg_groups.model_override_base import (
        attention_backends_of,
        resolved_view,
    )

    if BACKEND_NAME in attention_backends_of(resolved_view(server_args)):
        return f"the attention backend {BACKEND_NAME}"
    return ", ".join(choice.origin for choice in collect({}).values())


def unresolved(request: str) -> SettingsError:
    """Return the error for a launch path that resolved its arguments without this plugin."""
    return SettingsError(
        f"{request} was not acted on, because the server's arguments were resolved before SGLang "
        "loaded its plugins. Call sglang.srt.plugins.load_plugins() before you make ServerArgs; "
        "sglang.Engine and the command line do it themselves."
    )


def agree(plan: Plan | None, rank: int, ranks: int, store: Store) -> None:
    """Compare this rank's plan with all others'; a rank without a plan only reports that.

    Raises:
        SettingsError: has the plans that differ and the nodes that have them.
    """
    store.set(_key(rank), json.dumps([socket.gethostname(), plan.terms if plan else _NOTHING]))
    if plan is None:
        return
    _wait(ranks, store)
    holders: dict[str, str] = {}
    for member in range(ranks):
        node, terms = json.loads(store.get(_key(member)))
        holders.setdefault(terms, f"rank {member} on {node}")
    if len(holders) > 1:
        holdings = "; ".join(f"{holder} has {terms}" for terms, holder in holders.items())
        raise SettingsError(
            f"the ranks of this server disagree: {holdings}. Every node resolves its own settings: "
            "give all of them the same flags, the same SGLANG_INDEXCACHE_* variables and the same "
            "pattern files."
        )


def _wait(ranks: int, store: Store) -> None:
    try:
        store.wait([_key(rank) for rank in range(ranks)], PATIENCE)
    except RuntimeError as error:  # each kind of store raises another error
        silent = [rank for rank in range(ranks) if not store.check([_key(rank)])]
        if not silent:
            raise
        raise SettingsError(
            f"rank {', '.join(map(str, silent))} did not say which pattern it runs. Is "
            "sglang-indexcache installed on its node, and loaded (SGLANG_PLUGINS, SGLANG_PLATFORM)?"
        ) from error


def _key(rank: int) -> str:
    return f"indexcache/plan/{rank}"


# KV from another pattern must never be used as this server's own. SGLang keeps cached prefixes
# apart by a request's ``extra_key``, to which requests.py adds the pattern's namespace. One way is
# left, which is closed here: a prefill node that runs another pattern.

_KV_MANAGER = "sglang.srt.disaggregation.common.conn.CommonKVManager"
_TAG = "with IndexCache"
_SGLANGS_ADVICE = "the same --kv-cache-dtype value"


def install_handshake() -> None:
    """Install hooks if prefill and decode run on separate nodes; safe to call again."""
    from sglang.srt.runtime_context import get_disagg

    if get_disagg().disaggregation_mode != "null":
        hooks.around(f"{_KV_MANAGER}.__init__", _tell_pattern)
        hooks.around(f"{_KV_MANAGER}.try_ensure_parallel_info", _turn_away)


def _tell_pattern(
    original: Callable[..., None], manager: Any, args: Any, *rest: Any, **named: Any
) -> None:
    """Add the pattern to the KV dtype, which prefill and decode nodes compare at the handshake."""
    args.kv_cache_dtype_str += _tag()
    original(manager, args, *rest, **named)


def _tag() -> str:
    """Return a node's suffix for its KV dtype; "" if stock SGLang computes the same KV."""
    if (process := current()) is None:
        return ""
    plan = process.plan
    if plan.mode == "live":
        return f" {_TAG} in live mode, library {plan.library}"
    adapter = f" adapter {plan.adapter_digest[:12]}" if plan.adapter else ""
    apart = plan.kv_apart
    return f" {_TAG} pattern {plan.pattern}{adapter}" if apart else ""


def _turn_away(original: Callable[..., bool], manager: Any, address: str) -> bool:
    """Fail requests from a prefill node with another pattern; SGLang would end this server."""
    try:
        return original(manager, address)
    except RuntimeError as error:
        if _TAG not in str(error):
            raise
        reason = str(error).replace(_SGLANGS_ADVICE, f"{_SGLANGS_ADVICE} and the same pattern")
        logger.error("IndexCache: nothing is taken from the prefill node %s: %s", address, reason)
        return False
