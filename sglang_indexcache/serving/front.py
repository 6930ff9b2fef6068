"""The HTTP process: which pattern a request names, and what its answer says of it.

Every route of SGLang's makes its requests by one function, ``TokenizerManager.generate_request``.
Around it a name is checked, so that a bad one is answered with HTTP 400, and one too many with 429;
and there an answer tells the pattern that it was made under. Some routes drop what a body says
beyond their own form, and a stream shows no meta information, so both also travel in a header::

    X-IndexCache-Pattern: uniform:1/4
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import chain
from typing import Any

from sglang_indexcache.ask.protocol import CUSTOM
from sglang_indexcache.ask.protocol import PATTERN_OF_REQUEST as NAME
from sglang_indexcache.errors import IndexCacheError, SettingsError
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving import hooks
from sglang_indexcache.serving.active import published_plan
from sglang_indexcache.serving.requests import named_by, names_ours, resolve
from sglang_indexcache.serving.settings import Plan

HEADER = "X-IndexCache-Pattern"
"""Of a request: the pattern that it names. Of an answer: the pattern that it was made under; those
of several prompts with commas. A stream of several prompts of which not all name one begins before
all of them are known, and has none."""

MOST_AT_ONCE = 32
"""Different patterns named by the requests in flight in a server. A forward's work grows to that of
the union of their F layers, so a mix of very many has the cost of no sharing."""

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_APP = "sglang.srt.entrypoints.http_server"
_CARRIERS = {
    "/generate": ("sampling_params", CUSTOM),
    "/invocations": (CUSTOM,),
    "/v1/chat/completions": (CUSTOM,),
    "/v1/completions": (CUSTOM,),
}
"""Where in a body a pattern is named, by route, and at Vertex AI's route, which its environment
names. Every other route takes the header only."""

_AT_VERTEX = ("parameters", "sampling_params", CUSTOM)

_LOOKED_INTO = {"sampling_params", CUSTOM, "parameters", "extra_body", "options"}
"""Keys under which people put a pattern; what they hold is looked at, not texts and messages."""


class TooManyError(SettingsError):
    """A pattern more than are taken at once, for the moment."""


@dataclass
class Told:
    """What one HTTP request has told of patterns so far.

    Attributes:
        header: the name in its header, or None.
        status: of its refusal; 0 while there is none.
        patterns: those of its answer; None while they are not known, () if they come too late.
    """

    header: str | None = None
    status: int = 0
    patterns: tuple[str, ...] | None = None

    def answer(self, given: Any) -> None:
        """Note the pattern that the first answer tells, or each of a list's."""
        if self.patterns is None:
            every = given if isinstance(given, list) else [given]
            infos = [one.get("meta_info") or {} for one in every if isinstance(one, dict)]
            told = chain.from_iterable(info.get(NAME) or () for info in infos)
            self.patterns = tuple(dict.fromkeys(told)) or None


REFUSALS = 400, 429
"""HTTP statuses of a request that is refused for its pattern, and where too many are in hand."""
on_refusal: list[Callable[[int], object]] = []
"""Told the HTTP status of each refusal; where metrics are on, ``metrics.py`` adds itself."""

_told: ContextVar[Told | None] = ContextVar("indexcache_told", default=None)
_in_flight: Counter[Pattern] = Counter()


def install() -> None:
    """Hook the process that takes requests; safe to call again."""
    hooks.around(f"{_MANAGER}.generate_request", _generate)
    hooks.after(f"{_MANAGER}.__init__", _add_middleware)


def tokenizer_worker_class() -> type:
    """In place of ``ServerArgs.get_tokenizer_worker_class``, which each tokenizer process calls.

    With ``--tokenizer-worker-num`` these load no plugins and resolve nothing. The arguments that
    they are sent carry this function by its name, and so bring the hooks along.
    """
    from sglang.srt.managers.multi_tokenizer_mixin import TokenizerWorker

    install()
    return TokenizerWorker


def _add_middleware(_result: None, _manager: Any, *_: Any, **__: Any) -> None:
    """Inside SGLang's own, which authenticate and unpack; a process without HTTP has no app."""
    from starlette.middleware import Middleware

    module = sys.modules.get(_APP)
    if module is None or any(each.cls is Front for each in module.app.user_middleware):
        return
    module.app.user_middleware.append(Middleware(Front))
    if module.app.middleware_stack is not None:  # a tokenizer process makes its manager late
        module.app.middleware_stack = module.app.build_middleware_stack()


# -- a request on its way in -------------------------------------------------------------------


async def _generate(
    original: Callable[..., Any], manager: Any, incoming: Any, *args: Any, **kwargs: Any
) -> AsyncIterator[Any]:
    """``TokenizerManager.generate_request``, for one prompt or for a batch."""
    told = _told.get() or Told()
    plan = published_plan()
    named: set[Pattern] = set()
    if plan is not None:
        try:
            named = _admit(plan, incoming, told)
        except IndexCacheError as error:
            told.status = 429 if isinstance(error, TooManyError) else 400
            _tell(told.status)
            refusal = ValueError(str(error))  # what SGLang answers with an error of the client's
            refusal.status_code = told.status  # type: ignore[attr-defined]
            raise refusal from error
    _in_flight.update(named)
    try:
        async with aclosing(original(manager, incoming, *args, **kwargs)) as answers:
            async for answer in answers:
                told.answer(answer)
                if not getattr(incoming, "stream", False):
                    # All is answered. SGLang's routes take this and drop us, and to be closed only
                    # when collected is too late for a client that asks again at once.
                    _release(named)
                yield answer
    finally:
        _release(named)


def _release(named: set[Pattern]) -> None:
    """Take the names of a request back, once."""
    _in_flight.subtract(named)
    for pattern in named:
        if not _in_flight[pattern]:
            del _in_flight[pattern]
    named.clear()


def _admit(plan: Plan, incoming: Any, told: Told) -> set[Pattern]:
    """The patterns that a request names, after it was given that of its header.

    Raises:
        IndexCacheError: a name that is none, two that disagree, or too many.
    """
    sampling = getattr(incoming, "sampling_params", None)
    several = sampling if isinstance(sampling, list) else [sampling]
    names = [named_by(each) for each in several]
    if told.header is not None:
        wanted = resolve(plan, told.header)
        for name in names:
            if name is not None and resolve(plan, name) != wanted:
                raise SettingsError(
                    f"the header {HEADER} names {told.header} and the body {name}. Give only one."
                )
        filled = [_with(each, str(wanted)) for each in several]
        incoming.sampling_params = filled if isinstance(sampling, list) else filled[0]
        names = [str(wanted)]
    patterns = {resolve(plan, name): None for name in names if name is not None}
    _check_room(set(patterns))
    if plan.mode == "static":
        told.patterns = (str(plan.pattern),)
        return set()
    if None not in names:
        told.patterns = tuple(map(str, patterns))
    elif getattr(incoming, "stream", False) and _is_batch(incoming):
        told.patterns = ()
    return set(patterns)


def _with(sampling: Any, name: str) -> dict[str, Any]:
    """Sampling parameters that name ``name``."""
    given = dict(sampling or {})
    return given | {CUSTOM: {**(given.get(CUSTOM) or {}), NAME: name}}


def _is_batch(incoming: Any) -> bool:
    prompts = (getattr(incoming, "text", None), getattr(incoming, "input_ids", None))
    return any(isinstance(p, list) and len(p) > 1 and not isinstance(p[0], int) for p in prompts)


def _check_room(patterns: set[Pattern]) -> None:
    """Each tokenizer process has its share of the limit, for it does not see the others' requests.

    Raises:
        SettingsError: too many for one request, or a pattern more than are taken now.
    """
    from sglang.srt.runtime_context import get_serving

    processes = get_serving().tokenizer_worker_num
    most = max(1, MOST_AT_ONCE // processes)
    who = "a server" if processes == 1 else f"each of this server's {processes} tokenizer processes"
    if len(patterns) > most:
        raise SettingsError(
            f"one request names {len(patterns)} different patterns, and {who} takes {most} at "
            "once. Split it."
        )
    others = {pattern for pattern, count in _in_flight.items() if count > 0} - patterns
    if patterns and len(others | patterns) > most:
        raise TooManyError(
            f"requests in flight name {len(others)} other patterns already, and {who} takes "
            f"{most} at once. Try again when some have finished."
        )


# -- around the routes -------------------------------------------------------------------------


class Front:
    """ASGI middleware: the header of a request, what its body misplaces, the header of its answer.

    An answer's first bytes wait until its pattern is known, which is when its first token is.
    """

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one HTTP request."""
        if scope["type"] != "http" or scope["method"] not in ("POST", "PUT"):
            await self._app(scope, receive, send)
            return
        headers: dict[str, str] = {}
        for key, value in scope["headers"]:  # one that comes twice is one list (RFC 9110, 5.2)
            name, said = key.decode("latin-1"), value.decode("latin-1")
            headers[name] = f"{headers[name]}, {said}" if name in headers else said
        told = Told(header=headers.get(HEADER.lower()))
        if not headers.get("content-type", "").startswith("multipart/"):
            receive, body = await _whole(receive)
            route = scope["path"].removeprefix(scope.get("root_path", ""))
            if wrong := _misspelt_header(headers) or misplaced(route, body):
                await _refuse(send, wrong)
                return
        token = _told.set(told)
        try:
            await self._app(scope, receive, _Answer(told, send))
        finally:
            _told.reset(token)


class _Answer:
    """``send`` of one answer, which holds back until it knows what the header says."""

    def __init__(self, told: Told, send: Send) -> None:
        self._told, self._send = told, send
        self._held: list[Message] = []
        self._begun = False

    async def __call__(self, message: Message) -> None:
        if self._begun or message["type"] not in ("http.response.start", "http.response.body"):
            await self._send(message)
            return
        self._held.append(message)
        is_last = message["type"] == "http.response.body" and not message.get("more_body")
        has_body = len(self._held) > 1
        if is_last or (has_body and (self._told.patterns is not None or self._told.status)):
            self._begun = True
            self._mark(self._held[0])
            for each in self._held:
                await self._send(each)
            self._held.clear()

    def _mark(self, start: Message) -> None:
        told, more = self._told, []
        if told.status:
            start["status"] = told.status
            more += [(b"retry-after", b"1")] * (told.status == 429)
        elif told.patterns:
            more.append((HEADER.lower().encode(), ", ".join(told.patterns).encode()))
        start["headers"] = [*start.get("headers", ()), *more]


async def _whole(receive: Receive) -> tuple[Receive, bytes]:
    """A request's body, and a ``receive`` that gives it once more."""
    messages = [await receive()]
    while messages[-1]["type"] == "http.request" and messages[-1].get("more_body"):
        messages.append(await receive())
    body = b"".join(message.get("body", b"") for message in messages)

    async def again() -> Message:
        return messages.pop(0) if messages else await receive()

    return again, body


async def _refuse(send: Send, reason: str) -> None:
    _tell(400)
    said = {"message": reason, "type": "BadRequest", "code": 400}
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps({"error": said}).encode()})


def _tell(status: int) -> None:
    for listener in on_refusal:
        listener(status)


def _misspelt_header(headers: MutableMapping[str, str]) -> str:
    found = [name for name in headers if names_ours(name) and name != HEADER.lower()]
    return f"no header is called {found[0]}. The pattern is named in {HEADER}." if found else ""


def misplaced(route: str, body: bytes) -> str:
    """What is wrong with the place or the spelling of a pattern in a body, or "".

    A server would answer it under its default, and nobody would see.
    """
    if b"indexcache" not in body.lower().translate(None, b"-_ "):
        return ""  # without parsing a long prompt
    try:
        found = [*_ours(json.loads(body))]
    except (ValueError, RecursionError):
        return ""  # SGLang says so
    place = _CARRIERS.get(route)
    if place is None and route == os.environ.get("AIP_PREDICT_ROUTE", "/vertex_generate"):
        place = _AT_VERTEX
    carrier = None if place is None else (*place, NAME)
    for path in found:
        if path != carrier:
            where = f"in {'.'.join(carrier)} or " if carrier else ""
            return (
                f"{'.'.join(path)} is read by nobody at {route}. Name the pattern {where}in the "
                f"header {HEADER}."
            )
    return ""


def _ours(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The places of keys that mean IndexCache, in any spelling."""
    if isinstance(value, list):
        for each in value:
            yield from _ours(each, path)
    elif isinstance(value, dict):
        for key, inside in value.items():
            if names_ours(key):
                yield (*path, key)
            elif key in _LOOKED_INTO:
                yield from _ours(inside, (*path, key))
