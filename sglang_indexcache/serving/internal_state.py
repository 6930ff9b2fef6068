"""Report a running engine's patterns and, in live mode, replace the default for new requests.

``GET /server_info`` shows the state of every scheduler under ``internal_states[i].indexcache``.
``POST /set_internal_state`` takes a new pattern, in a key because SGLang allows only numbers as
values: ``{"server_args": {"indexcache_pattern=uniform:1/4": 1}}``. Admitted requests keep their
patterns, and cached KV is kept apart by pattern (``requests.py``), so nothing is retracted or
flushed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_indexcache.errors import IndexCacheError, SettingsError
from sglang_indexcache.serving import hooks, requests
from sglang_indexcache.serving.options import MODE
from sglang_indexcache.serving.policy import Policy
from sglang_indexcache.serving.process import ServingProcess, current
from sglang_indexcache.serving.protocol import STATE, SWITCH

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

logger = logging.getLogger(__name__)

on_switch: list[Callable[[ServingProcess], None]] = []
"""Functions to call after each attempt to switch."""

_STATE = "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController"


def install() -> None:
    """Install hooks in the scheduler of this process; safe to call again."""
    hooks.after(f"{_STATE}.get_internal_state", _report)
    hooks.around(f"{_STATE}.set_internal_state", _accept)


def _report(output: Any, _controller: Any, _request: Any) -> None:
    process = current()
    if process is None:
        return
    try:
        state = process.report(
            rank=_rank(),
            requests=requests.in_hand(),
            stage=(process.traffic.here.start, process.traffic.here.stop),
            index_k_bytes_per_token=process.traffic.index_k_bytes,
        ).to_json()
    except Exception as error:  # in the scheduler's loop, where it would end the server
        logger.exception("IndexCache: the state could not be reported")
        state = {"error": f"{type(error).__name__}: {error}"}
    output.internal_state[STATE] = state


def _rank() -> int:
    """Return this process's number among the data-parallel ranks."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return int(parallel.attn_dp_rank if parallel.dp_rank is None else parallel.dp_rank)


def _accept(original: Callable[..., Any], controller: Any, request: Any) -> Any:
    from sglang.srt.managers.io_struct import SetInternalStateReqOutput

    values = [key.removeprefix(SWITCH) for key in request.server_args if key.startswith(SWITCH)]
    if not values:
        return original(controller, request)
    process = current()
    try:
        if process is None:
            raise SettingsError("this server does not run IndexCache")
        if len(request.server_args) > 1:
            raise SettingsError("a pattern is switched alone, in a request of its own")
        if request.server_args[SWITCH + values[0]] != 1:
            raise SettingsError(f'the value must be 1: {{"{SWITCH}{values[0]}": 1}}')
        switch(controller.scheduler, process, values[0])
    except Exception as error:  # in the scheduler's loop, where it would end the server
        ours = isinstance(error, IndexCacheError)
        reason = str(error) if ours else f"{type(error).__name__}: {error}"
        level = logging.WARNING if ours else logging.ERROR
        logger.log(level, "IndexCache: pattern not switched: %s", reason, exc_info=not ours)
    else:
        _tell(process)
        return SetInternalStateReqOutput(updated=True)
    if process is not None:
        process.last_rejection = reason
        process.traffic.rejections["switch"] += 1
    _tell(process)
    return SetInternalStateReqOutput(updated=False)


def _tell(process: ServingProcess | None) -> None:
    """Make metrics show a switch, or its refusal, at once; without traffic nothing else would."""
    if process is not None:
        for listener in on_switch:
            listener(process)


def switch(scheduler: Scheduler, process: ServingProcess, value: str) -> None:
    """Make ``value`` the pattern of future requests that name none.

    It may be anything that ``--indexcache-pattern`` takes except a file, because the server would
    read it.

    Raises:
        IndexCacheError: the pattern does not fit, or this server cannot switch.
    """
    plan = process.plan
    if plan.mode != "live":
        raise SettingsError(
            f"the server was started in static mode, where shared layers have no indexer. Start "
            f"it with {MODE.flag} live."
        )
    policy = Policy.parse(value, lambda name: requests.resolve(plan, name))
    process.last_rejection = ""
    if policy == process.policy:
        return
    _check_both_nodes_switch_alike(scheduler)
    process.replace(policy, f"{value}, set while the server ran")
    logger.info("IndexCache: requests to come have %s", policy)


def _check_both_nodes_switch_alike(scheduler: Scheduler) -> None:
    """Refuse a switch if prefill and decode nodes could treat a running request differently."""
    from sglang.srt.runtime_context import get_disagg

    if get_disagg().disaggregation_mode != "null" and not scheduler.is_fully_idle():
        raise SettingsError(
            "requests are running, and under disaggregation one could be prefilled under one "
            "pattern and decoded under the other. Switch when the server is idle, or name the "
            "pattern in each request."
        )
