"""The pattern of each request, decided when the request is admitted and kept to its last token.

A request may name its pattern in the sampling parameters, which SGLang passes from both of its APIs
to the scheduler; else the server's policy decides by the prompt's length::

    {"sampling_params": {"custom_params": {"indexcache_pattern": "uniform:1/4"}}}

The schedulers decide when they create the request, from data that all ranks of a group get in the
same order. The HTTP process has checked the name before (``http_checks.py``).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from sglang_indexcache.errors import IndexCacheError, PatternError, SettingsError
from sglang_indexcache.library.resolve import Library
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving import hooks
from sglang_indexcache.serving.options import MODE
from sglang_indexcache.serving.plan import Plan
from sglang_indexcache.serving.process import ServingProcess, current
from sglang_indexcache.serving.protocol import CUSTOM
from sglang_indexcache.serving.protocol import PATTERN_OF_REQUEST as NAME
from sglang_indexcache.serving.refusals import stage_starts_here
from sglang_indexcache.serving.rows import RequestIds

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.session.session_controller import Session

_LONGEST_NAME = 1000
_REMEMBERED = 1024
"""Number of names, good and bad, whose pattern or error a process caches."""
_STREAMER = "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer"

_admitted: WeakSet[Req] = WeakSet()
"""Admitted requests of this process that are still referenced, without those that were given up."""


def install(plan: Plan) -> None:
    """Install the hooks that ``plan`` needs in this process's scheduler; safe to call again.

    Raises:
        SettingsError: see :func:`library_of`.
    """
    library_of(plan)
    hooks.after("sglang.srt.managers.schedule_batch.Req.__init__", _admit)
    hooks.after("sglang.srt.managers.scheduler.Scheduler._release_aborted_request", _give_up)
    hooks.around(f"{_STREAMER}.is_request_level_customized_info_key", _is_told_once)
    if plan.mode == "live":
        hooks.after(
            "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new", _tell_batch
        )


# -- the decision ------------------------------------------------------------------------------


def named_by(sampling_params: Any) -> Any:
    """Return a request's own value for its pattern, of any type; None if it has none.

    Raises:
        SettingsError: the request names a pattern in a wrong place or spelling.
    """
    custom = getattr(sampling_params, CUSTOM, None)
    if custom is None:
        return None
    if not isinstance(custom, dict):
        raise SettingsError(
            f'custom_params is a {type(custom).__name__}. Write {{"{NAME}": "uniform:1/4"}}.'
        )
    if wrong := [key for key in custom if names_ours(key) and key != NAME]:
        raise SettingsError(f"custom_params has {wrong[0]!r}. The pattern is named in {NAME}.")
    return custom.get(NAME)


def names_ours(key: object) -> bool:
    """Return whether ``key`` means this plugin, in any spelling."""
    return isinstance(key, str) and "indexcache" in letters(key)


def names_pattern(key: object) -> bool:
    """Return whether ``key`` means the key of a request's pattern, in any spelling."""
    return isinstance(key, str) and letters(key) == letters(NAME)


def letters(key: str) -> str:
    """Return a key in small letters alone, in which people's spellings of it agree."""
    return re.sub(r"[\W_]", "", key.lower())


def resolve(plan: Plan, value: Any) -> Pattern:
    """Return the pattern for a client's text ``value``.

    It takes what ``--indexcache-pattern`` takes except files, because the server would read them.

    Raises:
        IndexCacheError: ``value`` is no pattern, or does not fit the model or this server's mode.
    """
    if not isinstance(value, str):
        raise PatternError(f"{NAME} must be a string, got {type(value).__name__}")
    if len(value) > _LONGEST_NAME:
        raise PatternError(f"no pattern is called by {len(value)} characters; no model has as many")
    pattern = _remembered(plan, value)
    if isinstance(pattern, IndexCacheError):
        raise pattern.with_traceback(None)
    if plan.mode == "live":
        pattern.check_stages(stage_starts_here(plan))
    elif pattern != plan.pattern:
        raise SettingsError(
            f"the server was started in static mode, where shared layers have no indexer, so "
            f"it serves {plan.pattern} only. Start it with {MODE.flag} live."
        )
    return pattern


@lru_cache(maxsize=_REMEMBERED)
def _remembered(plan: Plan, value: str) -> Pattern | IndexCacheError:
    """Return the pattern for ``value``, or the error that says why there is none."""
    try:
        return library_of(plan).resolve(value, plan.checkpoint(), files=False).pattern
    except IndexCacheError as error:
        return type(error)(str(error))  # without a traceback, which holds frames


def library_of(plan: Plan) -> Library:
    """Return this server's pattern library, which each of its processes reads once, at the start.

    Later changes of the files take effect when the server is restarted.

    Raises:
        SettingsError: the files have changed since the server's arguments were resolved.
    """
    return _library(plan.library)


@lru_cache(maxsize=1)
def _library(digest: str) -> Library:
    library = Library.default()
    if library.digest != digest and digest:
        raise SettingsError(
            f"the pattern files changed while this server started: they were {digest} and are "
            f"{library.digest}. Start it again."
        )
    return library


def _decide(process: ServingProcess, request: Req) -> Pattern:
    """Decide a new request's pattern; in a session it is the pattern of the first served turn."""
    name = named_by(request.sampling_params)
    named = None if name is None else resolve(process.plan, name)
    of_session = _begun(request.session)
    if named is not None and of_session is not None and named != of_session:
        raise SettingsError(
            f"the session was begun under pattern {of_session} and cannot go on under {named}"
        )
    return of_session or named or process.policy.pattern_for(len(request.origin_input_ids))


def _begun(session: Session | None) -> Pattern | None:
    """Return the pattern of a session's earlier turns; None if no turn was served yet.

    SGLang keeps only the last finished turn of a streaming session, and with it the KV. It keeps
    every turn of a plain session, including turns that it refused or gave up, or whose client
    disconnected.
    """
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    for node in session.req_nodes.values() if session is not None else ():
        reason = node.req.finished_reason or node.req.to_finish
        if node.req in _admitted and not isinstance(reason, FINISH_ABORT):
            return node.req.indexcache_pattern
    return None


# -- in the scheduler --------------------------------------------------------------------------


def _admit(_result: None, request: Req, *_args: Any, **_kwargs: Any) -> None:
    process = current()
    if process is None:
        return
    try:
        pattern = _decide(process, request)
    except IndexCacheError as error:  # the request did not pass the HTTP process's check
        pattern = process.pattern
        process.traffic.rejections["request"] += 1
        request.set_finish_with_abort(str(error))
    request.indexcache_pattern = pattern
    request.customized_info = {NAME: [str(pattern)]}
    if (namespace := process.plan.kv_namespace(pattern)) is not None:
        request.extra_key = within(namespace, request.extra_key)
    _admitted.add(request)


def _give_up(_result: None, _scheduler: Scheduler, request: Req) -> None:
    """Forget a request that is aborted in a queue, which SGLang never marks as finished."""
    _admitted.discard(request)


def within(namespace: str, extra_key: str | None) -> str:
    """Return a request's ``extra_key`` prefixed with ``namespace``.

    A key with this prefix stays as it is: a decode node sends requests back to a prefill node with
    their key.
    """
    if extra_key is None or extra_key == namespace:
        return namespace
    prefix = f"{namespace}|"
    return extra_key if extra_key.startswith(prefix) else prefix + extra_key


def _is_told_once(original: Callable[..., bool], streamer: Any, key: str) -> bool:
    """Return whether ``key`` has one value per request; SGLang would expect ours per token."""
    return key == NAME or original(streamer, key)


def in_hand() -> dict[str, int]:
    """Count each pattern's unfinished requests, running or queued, in this process."""
    unfinished = (request for request in _admitted if not request.finished())
    return dict(Counter(str(request.indexcache_pattern) for request in unfinished))


def _tell_batch(
    batch: ForwardBatch, _cls: type, scheduled: ScheduleBatch, *_: Any, **__: Any
) -> None:
    batch.rids = RequestIds(scheduled.reqs)
