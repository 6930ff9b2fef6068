"""Each request has a pattern: decided when it is admitted, kept to its last token.

A request may name it in the sampling parameters, which SGLang carries from both of its APIs to the
scheduler; else the server's policy decides by the prompt's length::

    {"sampling_params": {"custom_params": {"indexcache_pattern": "uniform:1/4"}}}

The schedulers decide, when they make the request, from what every rank of a group was sent in the
same order. The HTTP process looks first, so that a bad name is answered there (HTTP 400).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from sglang_indexcache.ask.protocol import PATTERN_OF_REQUEST as NAME
from sglang_indexcache.errors import IndexCacheError, PatternError, SettingsError
from sglang_indexcache.library import Library, names_a_file
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving import hooks
from sglang_indexcache.serving.active import ActivePattern, current, published_plan
from sglang_indexcache.serving.refusals import stage_starts_here
from sglang_indexcache.serving.rows import RequestIds
from sglang_indexcache.serving.settings import MODE, Plan

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

MOST_AT_ONCE = 32
"""Different names of patterns among the requests in flight in one HTTP process. A forward's work
grows to that of the union of their F layers, so a mix of very many has the cost of no sharing."""

_LONGEST_NAME = 1000
_STREAMER = "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer"

_admitted: WeakSet[Req] = WeakSet()
"""The requests of this process that somebody still holds."""


def install(plan: Plan) -> None:
    """Hook the scheduler of this process as ``plan`` needs it; safe to call again."""
    hooks.after("sglang.srt.managers.schedule_batch.Req.__init__", _admit)
    hooks.around(f"{_STREAMER}.is_request_level_customized_info_key", _is_told_once)
    if plan.mode == "live":
        hooks.after(
            "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new", _tell_batch
        )


def install_in_front() -> None:
    """Hook the process that takes requests; safe to call again."""
    hooks.around(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._create_tokenized_object",
        _check_name,
    )


# -- the decision ------------------------------------------------------------------------------


def named_by(sampling_params: Any) -> Any:
    """What a request says of its pattern, of whatever type; None if it says nothing.

    Args:
        sampling_params: as a client sent them, or as SGLang holds them.
    """
    if isinstance(sampling_params, dict):
        custom = sampling_params.get("custom_params")
    else:
        custom = getattr(sampling_params, "custom_params", None)
    return custom.get(NAME) if isinstance(custom, dict) else None


def resolve(plan: Plan, value: Any) -> Pattern:
    """The pattern that somebody who can only reach the server calls ``value``.

    Args:
        plan: of this server.
        value: as for ``--indexcache-pattern``, but no file: it would be read on the server.

    Raises:
        IndexCacheError: it is no pattern, or does not fit the model or this server's mode.
    """
    if not isinstance(value, str):
        raise PatternError(f"{NAME} must be a string, got {type(value).__name__}")
    if len(value) > _LONGEST_NAME:
        raise PatternError(f"no pattern is called by {len(value)} characters; no model has as many")
    return _resolve(plan, value)


@lru_cache(maxsize=256)
def _resolve(plan: Plan, value: str) -> Pattern:
    if names_a_file(value):
        raise SettingsError(
            f"{value!r} is a file, and a server reads none for whoever can reach it. Send its F/S "
            "string, or start the server with SGLANG_INDEXCACHE_LIBRARY and send the name."
        )
    pattern = Library.default().resolve(value, plan.checkpoint()).pattern
    if plan.mode == "static":
        if pattern != plan.pattern:
            raise SettingsError(
                f"the server was started in static mode, where shared layers have no indexer, so "
                f"it serves {plan.pattern} only. Start it with {MODE.flag} live."
            )
        return pattern
    pattern.check_stages(stage_starts_here(plan))
    return pattern


def _decide(active: ActivePattern, request: Req) -> Pattern:
    """The pattern of a new request.

    A session goes on with the KV of its earlier turns, so its first request decides for all.
    """
    name = named_by(request.sampling_params)
    wanted = None if name is None else resolve(active.plan, name)
    if active.adapted and wanted not in (None, active.plan.pattern):
        raise SettingsError(
            f"the adapter's indexers are in effect, which were trained for {active.plan.pattern}: "
            "name no other pattern, or switch the server to another first"
        )
    begun = getattr(request.session, NAME, None)
    if wanted is not None and begun is not None and wanted != begun:
        raise SettingsError(
            f"the session was begun under pattern {begun} and cannot go on under {wanted}"
        )
    return begun or wanted or active.policy.pattern_for(len(request.origin_input_ids))


# -- in the scheduler --------------------------------------------------------------------------


def _admit(_result: None, request: Req, *_args: Any, **_kwargs: Any) -> None:
    active = current()
    if active is None:
        return
    try:
        pattern = _decide(active, request)
    except IndexCacheError as error:  # it came by another way than the HTTP process
        pattern = active.pattern
        request.set_finish_with_abort(str(error))
    request.indexcache_pattern = pattern
    request.customized_info = {NAME: [str(pattern)]}
    if request.session is not None:
        setattr(request.session, NAME, pattern)
    if (namespace := active.plan.kv_namespace(pattern, adapted=active.adapted)) is not None:
        request.extra_key = within(namespace, request.extra_key)
    _admitted.add(request)


def within(namespace: str, extra_key: str | None) -> str:
    """A request's ``extra_key`` inside ``namespace``.

    A decode node sends requests back to a prefill node with the key that they have by then, so a
    key inside the namespace stays as it is.
    """
    if extra_key is None or extra_key == namespace:
        return namespace
    prefix = f"{namespace}|"
    return extra_key if extra_key.startswith(prefix) else prefix + extra_key


def _is_told_once(original: Callable[..., bool], streamer: Any, key: str) -> bool:
    """SGLang otherwise takes what a request tells of itself for one value per token."""
    return key == NAME or original(streamer, key)


def in_hand() -> dict[str, int]:
    """How many unfinished requests, running or queued, each pattern has in this process."""
    unfinished = (request for request in _admitted if not request.finished())
    return dict(Counter(str(request.indexcache_pattern) for request in unfinished))


def _tell_batch(
    batch: ForwardBatch, _cls: type, scheduled: ScheduleBatch, *_: Any, **__: Any
) -> None:
    batch.rids = RequestIds(scheduled.reqs)


# -- in the HTTP process -----------------------------------------------------------------------


def _check_name(
    original: Callable[..., Any], manager: Any, incoming: Any, *args: Any, **kwargs: Any
) -> Any:
    name = named_by(incoming.sampling_params)
    if name is not None and (plan := published_plan()) is not None:
        try:
            _check(plan, name, (state.obj for state in manager.rid_to_state.values()))
        except IndexCacheError as error:
            raise ValueError(str(error)) from error  # what SGLang answers with HTTP 400
    return original(manager, incoming, *args, **kwargs)


def _check(plan: Plan, name: Any, in_flight: Iterable[Any]) -> None:
    resolve(plan, name)
    others = {named_by(each.sampling_params) for each in in_flight} - {None, name}
    if len(others) >= MOST_AT_ONCE:
        raise SettingsError(
            f"requests in flight name {len(others)} other patterns already, and a server takes "
            f"{MOST_AT_ONCE} at once. Try again when some have finished."
        )
