"""Report the pattern of a running engine and, in live mode, replace it.

Both ride on SGLang's own HTTP routes. ``GET /server_info`` shows the state of every scheduler
under ``internal_states[i].indexcache``. ``POST /set_internal_state`` takes a new pattern, in a
key because SGLang allows only numbers as values::

    {"server_args": {"indexcache_pattern=uniform:1/4": 1}}

A switch happens between two batches. Cached KV depends on the pattern that made it, so running
requests are put back into the queue with what they generated so far, the radix cache is flushed,
and their context is computed again under the new pattern: no request ever attends to KV of
another pattern than the one in effect.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_indexcache.errors import IndexCacheError, SettingsError
from sglang_indexcache.library import Library
from sglang_indexcache.serving import hooks
from sglang_indexcache.serving.active import ActivePattern, current
from sglang_indexcache.serving.settings import MODE

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

logger = logging.getLogger(__name__)

_KEY = "indexcache_pattern="
_STATE = "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController"


def switch_request(value: str) -> dict[str, Any]:
    """The JSON body that asks ``/set_internal_state`` for pattern ``value``."""
    return {"server_args": {_KEY + value: 1}}


def install() -> None:
    """Hook the scheduler of this process; safe to call again."""
    hooks.after(f"{_STATE}.get_internal_state", _report)
    hooks.around(f"{_STATE}.set_internal_state", _accept)


def _report(output: Any, controller: Any, _request: Any) -> None:
    active = current()
    if active is not None:
        output.internal_state["indexcache"] = active.report() | {
            "index_k_bytes_per_token": _index_k_bytes_per_token(controller.scheduler),
            "indexer_weight_bytes": _indexer_weight_bytes(controller.scheduler),
        }


def _index_k_bytes_per_token(scheduler: Scheduler) -> int:
    """Bytes of index keys per token over this process's layers, from the buffers themselves."""
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    pool = getattr(pool, "full_kv_pool", pool)
    slots = pool.index_buf_size + pool.page_size
    return round(sum(buffer.nbytes for buffer in pool.index_key_cache.buffer) / slots)


def _indexer_weight_bytes(scheduler: Scheduler) -> dict[str, int]:
    """Bytes of indexer weights by layer, of the layers of this process that have any."""
    found: dict[str, int] = {}
    for name, parameter in scheduler.tp_worker.model_runner.model.named_parameters():
        layer, inside, _ = name.partition(".self_attn.indexer.")
        if inside:
            number = layer.rpartition(".")[2]
            found[number] = found.get(number, 0) + parameter.nbytes
    return found


def _accept(original: Callable[..., Any], controller: Any, request: Any) -> Any:
    from sglang.srt.managers.io_struct import SetInternalStateReqOutput

    values = [key.removeprefix(_KEY) for key in request.server_args if key.startswith(_KEY)]
    if not values:
        return original(controller, request)
    active = current()
    try:
        if active is None:
            raise SettingsError("this server does not run IndexCache")
        if len(request.server_args) > 1:
            raise SettingsError("a pattern is switched alone, in a request of its own")
        switch(controller.scheduler, active, values[0])
    except IndexCacheError as error:
        logger.warning("IndexCache: pattern not switched: %s", error)
        if active is not None:
            active.last_rejection = str(error)
        return SetInternalStateReqOutput(updated=False)
    return SetInternalStateReqOutput(updated=True)


def switch(scheduler: Scheduler, active: ActivePattern, value: str) -> None:
    """Make ``value`` the pattern of the next forward.

    Args:
        scheduler: SGLang's scheduler of this process, between two batches.
        active: the pattern to replace.
        value: as for ``--indexcache-pattern``.

    Raises:
        IndexCacheError: the pattern does not fit, or this server cannot switch.
    """
    plan = active.plan
    if plan.mode != "live":
        raise SettingsError(
            f"the server was started in static mode, where shared layers have no indexer. Start "
            f"it with {MODE.flag} live."
        )
    resolved = Library.default().resolve(value, plan.checkpoint())
    resolved.pattern.check_stages(_stage_starts(plan.layer_ids))
    active.last_rejection = ""
    if resolved.pattern == active.pattern:
        return
    _clear_cached_kv(scheduler)
    active.replace(resolved.pattern, f"/set_internal_state {value} ({resolved.description})")
    logger.info("IndexCache: now %s", resolved.pattern.summary())


def _stage_starts(layer_ids: tuple[int, ...]) -> list[int]:
    """Pattern positions at which a pipeline stage after the first begins.

    SGLang ships indices between stages only where the model was built with S layers, and in live
    mode it was not.
    """
    from sglang.srt.distributed.utils import get_pp_indices
    from sglang.srt.runtime_context import get_parallel

    stages = get_parallel().pp_size
    starts = [get_pp_indices(layer_ids[-1] + 1, rank, stages)[0] for rank in range(1, stages)]
    return [next(i for i, layer in enumerate(layer_ids) if layer >= start) for start in starts]


def _clear_cached_kv(scheduler: Scheduler) -> None:
    """Leave no KV of the old pattern behind: retract what runs, flush the radix cache."""
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput
    from sglang.srt.runtime_context import get_disagg, get_parallel

    if scheduler.is_fully_idle():
        scheduler.flush_cache(empty_cache=False)
        return
    if get_parallel().pp_size > 1 or get_disagg().disaggregation_mode != "null":
        raise SettingsError(
            "requests are running, and under pipeline parallelism or disaggregation they cannot "
            "be put back. Switch when the server is idle."
        )
    was_paused = scheduler._engine_paused
    scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
    flushed = scheduler.flush_cache(empty_cache=False)
    if not was_paused:
        scheduler.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))
    if not flushed:
        raise SettingsError("the KV cache is in use and could not be flushed. Try again.")
