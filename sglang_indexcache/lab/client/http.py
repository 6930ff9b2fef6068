"""The HTTP side of a running SGLang server."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import httpx

from sglang_indexcache.errors import ServerError, ServerUnavailableError
from sglang_indexcache.serving.protocol import SWITCH, RankState, states_of

_CONNECT_SECONDS = 10.0
"""Seconds for connecting: a running server accepts a connection at once, however long it then
works."""

_REUSE = httpx.Limits(max_connections=100, max_keepalive_connections=20, keepalive_expiry=2.0)
"""Limits of connections. SGLang closes a connection after 5 idle seconds, which is httpx's own
limit too, and a request sent just then is lost. The other two limits are httpx's."""

_AWAY = (httpx.TimeoutException, httpx.NetworkError, httpx.RemoteProtocolError)
"""Errors of a server that dies, restarts or is slow; other errors are the request's own."""

_BUSY = httpx.codes.TOO_MANY_REQUESTS


_ADMIN_PATHS = ("/set_internal_state", "/flush_cache")
"""Paths for which SGLang needs its admin key, if it was started with one."""


class Client:
    """HTTP client of a running server; an answer may take ``timeout`` seconds.

    The keys are the server's ``--api-key`` and, for switching patterns and flushing the cache, its
    ``--admin-api-key``.

    Raises:
        ServerError: a key has characters that no HTTP header can carry.
    """

    def __init__(
        self,
        url: str,
        timeout: float = 600.0,
        *,
        api_key: str | None = None,
        admin_api_key: str | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._key = _clean(api_key)
        self._admin_key = _clean(admin_api_key)
        self._http = httpx.Client(
            base_url=self.url,
            timeout=_patience(timeout),
            limits=_REUSE,
            trust_env=False,
            auth=self._authorize if api_key or admin_api_key else None,
        )

    @property
    def name(self) -> str:
        """Name of the server in messages."""
        return f"the server at {self.url}"

    def is_ready(self) -> bool:
        """Return whether the server answers requests."""
        try:
            return self._http.get("/health", timeout=5.0).status_code == 200
        except httpx.HTTPError:
            return False

    def generate(self, *, timeout: float | None = None, **body: Any) -> Any:
        """Call SGLang's native ``/generate``; the answer may take ``timeout`` seconds.

        Raises:
            ServerUnavailableError: there was no answer or only half of one; the server is
                unreachable or too slow.
            ServerError: the server refused the request.
        """
        return self._request("POST", "/generate", body, timeout)

    def stream(self, **body: Any) -> Iterator[dict[str, Any]]:
        """Call SGLang's native ``/generate``, and yield its chunks as they arrive.

        Raises:
            ServerError: the server refused the request, reported an error, or disconnected before
                the end.
        """
        try:
            with self._http.stream("POST", "/generate", json={**body, "stream": True}) as response:
                if response.status_code != 200:
                    response.read()
                    raise self._refusal(response)
                for line in _lines(response.iter_bytes()):
                    if line.startswith(b"data: {"):
                        chunk = self._chunk(line)
                        if "error" in chunk:
                            raise ServerError(f"{self.url} answered an error: {chunk['error']}")
                        yield chunk
        except httpx.HTTPError as error:
            raise ServerError(
                f"the server at {self.url} stopped answering in the middle of a request "
                f"({type(error).__name__}: {error})"
            ) from error

    def _chunk(self, line: bytes) -> dict[str, Any]:
        try:
            return dict(json.loads(line.removeprefix(b"data: ")))
        except ValueError as error:
            raise ServerError(
                f"the server at {self.url} sent a piece of an answer that is not JSON: "
                f"{line[:200]!r}. Is there a proxy in between that changes what goes through?"
            ) from error

    def server_info(self) -> dict[str, Any]:
        """Return SGLang's ``/server_info``."""
        return dict(self._request("GET", "/server_info"))

    def states(self) -> list[RankState]:
        """Return IndexCache's report, one entry per data-parallel rank.

        Raises:
            ServerError: the server does not run IndexCache, or cannot report its state.
        """
        states = states_of(self.server_info(), f"the server at {self.url}")
        if not states:
            raise ServerError(
                f"the server at {self.url} does not run IndexCache. Start it with "
                "--attention-backend indexcache."
            )
        return states

    def switch_pattern(self, value: str) -> list[RankState]:
        """Make ``value`` the pattern of a server in live mode, for requests that name none.

        Raises:
            ServerError: the server refused; has the server's reason.
        """
        self.states()
        body = {"server_args": {SWITCH + value: 1}}
        accepted = self._request("POST", "/set_internal_state", body)
        states = self.states()
        if not all(accepted):
            reasons = {state.last_rejection for state in states} - {""}
            raise ServerError(f"the server refused {value!r}: {'; '.join(sorted(reasons))}")
        return states

    def flush_cache(self, timeout: float = 60.0) -> None:
        """Flush the radix cache as soon as the server is idle, waiting up to ``timeout`` seconds.

        The server may still be busy when an answer arrives: a pipeline's first stage learns later
        than the client that the last stage has finished.
        """
        self._send("POST", f"/flush_cache?timeout={timeout}")

    def _request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> Any:
        response = self._send(method, path, body, timeout)
        try:
            return response.json()
        except ValueError as error:
            raise ServerUnavailableError(
                f"the server at {self.url} answered {path} with half an answer, or with something "
                "that is not JSON"
            ) from error

    def _send(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> httpx.Response:
        seconds = self._http.timeout if timeout is None else _patience(timeout)
        try:
            response = self._http.request(method, path, json=body, timeout=seconds)
        except httpx.ReadTimeout as error:
            raise ServerUnavailableError(
                f"the server at {self.url} did not answer {path} within {seconds.read:g} s"
            ) from error
        except _AWAY as error:
            raise ServerUnavailableError(
                f"cannot reach the server at {self.url} ({error}). "
                "Is it running, and is this its URL?"
            ) from error
        except httpx.HTTPError as error:
            raise ServerError(f"cannot reach the server at {self.url}: {error}") from error
        if response.status_code != 200:
            raise self._refusal(response)
        return response

    def _authorize(self, request: httpx.Request) -> httpx.Request:
        is_admin = request.url.path.endswith(_ADMIN_PATHS)
        if key := (is_admin and self._admin_key) or self._key:
            request.headers["Authorization"] = f"Bearer {key}"
        return request

    def _refusal(self, response: httpx.Response) -> ServerError:
        """Return the error for an answer other than 200, which never contains a key."""
        request, status = response.request, response.status_code
        reply = f"{request.method} {request.url} answered {status}"
        with_key = "Authorization" in request.headers
        if status == httpx.codes.UNAUTHORIZED:
            cause = "does not accept the API key that was sent" if with_key else "wants an API key"
            fix = "Give it with --api-key or in SGLANG_API_KEY"
            if request.url.path.endswith(_ADMIN_PATHS):
                fix += ", or with --admin-api-key or in SGLANG_ADMIN_API_KEY if it has such a key"
            return ServerError(f"the server {cause} ({reply}). {fix}.")
        if status == httpx.codes.FORBIDDEN:
            sender = "the API key that was sent" if with_key else "a request without an API key"
            return ServerError(
                f"the server forbids this to {sender} ({reply}). Ask whoever runs it, or the proxy "
                "in front of it, for a key that may."
            )
        kind = ServerUnavailableError if status >= 500 or status == _BUSY else ServerError
        return kind(f"{reply}: {response.text[:500]}")


def _lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines of an event stream; only LF ends one, as texts may hold other line ends."""
    pending = b""
    for piece in pieces:
        *complete, pending = (pending + piece).split(b"\n")
        yield from complete
    yield pending


def _patience(seconds: float) -> httpx.Timeout:
    """Return a timeout of ``seconds`` for an answer, with at most the usual time for connecting."""
    return httpx.Timeout(seconds, connect=min(seconds, _CONNECT_SECONDS))


def _clean(key: str | None) -> str:
    """Return ``key`` without the white space with which files end."""
    key = (key or "").strip()
    if not key.isascii() or not key.isprintable():
        raise ServerError("an API key has a character that no HTTP header can carry")
    return key
