"""Checks in the HTTP process: a wrong pattern, or one in a place that is not read, gets HTTP 400.

The schedulers decide a request's pattern (``requests.py``) and refuse a bad name too. But by then a
stream has begun, and they never see fields that an SGLang route drops.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from sglang_indexcache.errors import IndexCacheError
from sglang_indexcache.serving import hooks
from sglang_indexcache.serving.plan import Plan
from sglang_indexcache.serving.process import published_plan
from sglang_indexcache.serving.protocol import CUSTOM
from sglang_indexcache.serving.protocol import PATTERN_OF_REQUEST as NAME
from sglang_indexcache.serving.requests import (
    letters,
    library_of,
    names_ours,
    names_pattern,
    resolve,
)

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_APP = "sglang.srt.entrypoints.http_server"
_CARRIERS = {
    "/generate": ("sampling_params", CUSTOM, NAME),
    "/invocations": (CUSTOM, NAME),
    "/v1/chat/completions": (CUSTOM, NAME),
    "/v1/completions": (CUSTOM, NAME),
}
"""Place of a pattern in a body, by route. All other SGLang routes drop ``custom_params``."""

_LOOKED_INTO = {"samplingparams", "customparams", "parameters", "extrabody", "options"}
"""Keys, as :func:`letters`, under which people put a pattern. Other objects are a client's own: in
them only the pattern's own key is looked for, and nothing in texts and messages."""

_MAY_HIDE = re.compile(rb"\\u00[4-7]|\x00")
"""Encodings that hide a word in a body's bytes: escaped letters, which JSON never needs, and
UTF-16, which SGLang reads too."""

on_refusal: list[Callable[[], object]] = []
"""Functions to call at each refusal; with metrics on, ``operating/metrics.py`` adds one."""


def install() -> None:
    """Install hooks in the process that takes requests; safe to call again."""
    hooks.after("sglang.srt.managers.tokenizer_manager.TokenizerManager.__init__", _add_middleware)


def tokenizer_worker_class() -> type:
    """Replace ``ServerArgs.get_tokenizer_worker_class``, which each tokenizer process calls.

    With ``--tokenizer-worker-num`` these processes load no plugins and resolve no arguments. The
    arguments sent to them refer to this function by name, so the function installs the hooks there.
    """
    from sglang.srt.managers.multi_tokenizer_mixin import TokenizerWorker

    install()
    return TokenizerWorker


def _add_middleware(_result: None, _manager: Any, *_: Any, **__: Any) -> None:
    """Add our middleware inside SGLang's, which authenticates and unpacks, if there is an HTTP app.

    The pattern library is read here too, so that no client waits for it.
    """
    from starlette.middleware import Middleware

    if (plan := published_plan()) is not None:
        library_of(plan)

    module = sys.modules.get(_APP)
    if module is None or any(layer.cls is PatternCheck for layer in module.app.user_middleware):
        return
    module.app.user_middleware.append(Middleware(PatternCheck))
    if module.app.middleware_stack is not None:  # in a tokenizer process the app is already built
        module.app.middleware_stack = module.app.build_middleware_stack()


class PatternCheck:
    """ASGI middleware that checks requests before SGLang's routes get them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one HTTP request."""
        wrong, plan = "", published_plan()
        if plan is not None and scope["type"] == "http" and scope["method"] in ("POST", "PUT"):
            content_type = dict(scope["headers"]).get(b"content-type", b"")
            if not content_type.startswith(b"multipart/"):
                receive, body = await _whole(receive)
                route = scope["path"].removeprefix(scope.get("root_path", ""))
                wrong = _wrong_query(scope["query_string"], route) or wrong_body(plan, route, body)
        if wrong:
            await _refuse(send, wrong)
        else:
            await self._app(scope, receive, send)


async def _whole(receive: Receive) -> tuple[Receive, bytes]:
    """Read a request's body; return a ``receive`` that replays it, and the body."""
    messages = [await receive()]
    while messages[-1]["type"] == "http.request" and messages[-1].get("more_body"):
        messages.append(await receive())
    body = b"".join(message.get("body", b"") for message in messages)

    async def again() -> Message:
        return messages.pop(0) if messages else await receive()

    return again, body


async def _refuse(send: Send, reason: str) -> None:
    for listener in on_refusal:
        listener()
    error = {"message": reason, "type": "BadRequest", "code": 400}
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps({"error": error}).encode()})


def _wrong_query(query: bytes, route: str) -> str:
    """Return that a URL's query, which no route reads, names a pattern; "" if it does not."""
    for name, _ in parse_qsl(query.decode("latin-1"), keep_blank_values=True):
        if names_ours(name):
            return f"{name} in the URL is read by nobody. {_where(_CARRIERS.get(route))}"
    return ""


def wrong_body(plan: Plan, route: str, body: bytes) -> str:
    """Return what is wrong with the place or the spelling of a pattern in a body; "" if nothing is.

    Unchecked, such a request would be answered under the default pattern, and nobody would notice.
    """
    plain = body.lower().translate(None, b"-_ ")
    if b"indexcache" not in plain and not _MAY_HIDE.search(body):
        return ""  # so a long prompt is not parsed
    try:
        fields = [*_ours(json.loads(body))]
    except (ValueError, RecursionError):
        return ""  # SGLang reports it
    carrier = _CARRIERS.get(route.rstrip("/"))  # SGLang redirects a path with a final slash
    for path, name in fields:
        if path != carrier:
            return f"{'.'.join(path)} is read by nobody at {route}. {_where(carrier)}"
        try:
            if name is not None:
                resolve(plan, name)
        except IndexCacheError as error:
            return str(error)
    return ""


def _where(carrier: tuple[str, ...] | None) -> str:
    if carrier is not None:
        return f"Name the pattern in {'.'.join(carrier)}."
    places = [f"{'.'.join(path)} of {route}" for route, path in _CARRIERS.items()]
    return f"A pattern is named in the body: in {', or '.join(places)}."


def _ours(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the paths of keys that mean IndexCache, in any spelling, and their values."""
    if isinstance(value, list):
        for item in value:
            yield from _ours(item, path)
    elif isinstance(value, dict):
        for key, inside in value.items():
            if names_ours(key):
                yield (*path, key), inside
            elif letters(key) in _LOOKED_INTO:
                yield from _ours(inside, (*path, key))
            elif isinstance(inside, dict):
                yield from (
                    ((*path, key, label), inside[label]) for label in inside if names_pattern(label)
                )
