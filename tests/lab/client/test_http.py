"""Starting a server: its port; and talking to one that wants a key."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from sglang_indexcache.errors import ServerError, ServerUnavailableError
from sglang_indexcache.lab.client import launch
from sglang_indexcache.lab.client.http import Client
from sglang_indexcache.lab.client.launch import Server, free_port
from tests.fakes import state
from tests.fakes.server import FakeServer, serving


def test_a_free_port_is_below_those_of_outgoing_connections() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(20):
        port = free_port()
        assert 1024 < port < first
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))


def test_a_port_in_use_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        monkeypatch.setattr(launch, "_PORTS", range(port, port + 100))
        assert free_port() != port
    monkeypatch.setattr(launch.random.SystemRandom, "sample", lambda *_: [])
    with pytest.raises(ServerError, match="no free port"):
        free_port()


def test_a_port_that_a_server_has_not_taken_yet_is_given_to_nobody_else() -> None:
    """Two servers on one port: the requests for the slow one would reach the other."""
    code = f"""from sglang_indexcache.lab.client import launch
launch.random.SystemRandom.sample = lambda *_: [{free_port()}, {free_port()}]
launch.free_port()"""
    command = [sys.executable, "-c", code]
    assert "found no free port" in subprocess.run(command, capture_output=True, text=True).stderr


def test_a_server_whose_port_was_taken_is_given_up_at_once(tmp_path: Path) -> None:
    """SGLang's process stays when its HTTP server cannot listen."""
    server = Server([], tmp_path / "log", port=29999)
    message = "ERROR: [Errno 98] error while attempting to bind: address already in use"
    server.command = [
        sys.executable,
        "-c",
        f"import time; print({message!r}, flush=True); time.sleep(60)",
    ]
    with server, pytest.raises(ServerError, match="port 29999 is in use"):
        server.wait_until_ready()
    assert server.wait(0) == -signal.SIGTERM, "it ended by itself"


class _ClosesIdleConnections(BaseHTTPRequestHandler):
    """Has closed a connection after a second when its next request arrives: it is not answered."""

    protocol_version = "HTTP/1.1"
    answered = float("inf")

    def do_GET(self) -> None:
        if time.monotonic() - self.answered > 1:
            self.close_connection = True
            return
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")
        self.answered = time.monotonic()


def test_a_connection_that_the_server_may_be_closing_is_not_used_again() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _ClosesIdleConnections) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        client = Client(f"http://127.0.0.1:{server.server_port}")
        assert client.server_info() == {}
        time.sleep(2.2)
        assert client.server_info() == {}
        server.shutdown()


def test_without_sglang_no_server_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError) as error:
        Server([], tmp_path / "log").start()
    assert error.value.name == "sglang"  # from which the command line says what to install
    assert not (tmp_path / "log").exists()


KEYS = {"api_key": "the-key", "admin_api_key": "the-admin-key"}


def test_a_client_sends_its_keys() -> None:
    """Each route gets the one that SGLang wants there, streams included."""
    with serving(FakeServer("FFFF", mode="live", **KEYS)) as url:
        client = Client(url, **KEYS)
        assert client.switch_pattern("FSFS")[0].pattern == "FSFS"
        client.flush_cache()
        [*chunks] = client.stream(input_ids=[[1, 2]], sampling_params={"max_new_tokens": 2})
        assert len(chunks) == 2


@pytest.mark.parametrize("keys", [{"api_key": "k"}, {"admin_api_key": "k"}])
def test_one_key_is_enough_for_a_server_with_one(keys: dict[str, str]) -> None:
    with serving(FakeServer("FFFF", mode="live", **keys)) as url:
        assert Client(url, api_key=" k\n").switch_pattern("FSFS")[0].pattern == "FSFS"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "wants an API key .*GET .*/server_info answered 401.* in SGLANG_API_KEY"),
        ({"api_key": "wrong"}, "does not accept the API key that was sent .* 401"),
        ({"api_key": "the-key"}, "/set_internal_state answered 401.* SGLANG_ADMIN_API_KEY"),
    ],
)
def test_a_missing_key_is_told_as_that(keys: dict[str, str], message: str) -> None:
    with (
        serving(FakeServer("FFFF", mode="live", **KEYS)) as url,
        pytest.raises(ServerError, match=message) as error,
    ):
        Client(url, **keys).switch_pattern("FSFS")
    assert not [key for key in ("wrong", *KEYS.values()) if key in str(error.value)]


class Pieces:
    """A streamed response that arrives in pieces of three bytes."""

    status_code = 200

    def __init__(self, content: bytes) -> None:
        self._content = content

    def __enter__(self) -> Pieces:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def iter_bytes(self) -> Iterator[bytes]:
        for start in range(0, len(self._content), 3):
            yield self._content[start : start + 3]


def streamed(monkeypatch: pytest.MonkeyPatch, content: bytes) -> list[Any]:
    monkeypatch.setattr("httpx.Client.stream", lambda *_, **__: Pieces(content))
    return list(Client("http://127.0.0.1:9").stream(text="hello"))


@pytest.mark.parametrize("end", ["\u0085", "\u2028", "\u2029"])
def test_a_text_may_have_other_line_ends(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """SGLang sends them as they are, and a stream of events does not end its lines there."""
    chunks = [{"text": f"one{end}two"}, {"text": end}]
    lines = [f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n" for chunk in chunks]
    assert streamed(monkeypatch, "".join([*lines, "data: [DONE]\n\n"]).encode()) == chunks


@pytest.mark.parametrize("content", [b'data: {"text": "on\n\n', b'data: {"text": "\xff"}\n\n'])
def test_a_piece_that_is_not_json_is_told(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    with pytest.raises(ServerError, match="a piece of an answer that is not JSON"):
        streamed(monkeypatch, content)


def test_a_stream_tells_a_missing_key_too() -> None:
    with (
        serving(FakeServer("FFFF", api_key="k")) as url,
        pytest.raises(ServerError, match="wants an API key"),
    ):
        next(Client(url).stream(input_ids=[[1]]))


@pytest.mark.parametrize(
    ("key", "sender"), [(None, "a request without an API key"), ("k", "the API key that was sent")]
)
def test_what_is_forbidden_is_told_as_that(key: str | None, sender: str) -> None:
    with (
        serving(FakeServer("FFFF", fault="forbidden")) as url,
        pytest.raises(ServerError, match=f"forbids this to {sender} .* answered 403"),
    ):
        Client(url, api_key=key).states()


@pytest.mark.parametrize("key", ["schlüssel", "two\nkeys"])
def test_a_key_that_no_header_can_carry_is_not_repeated(key: str) -> None:
    with pytest.raises(ServerError, match="no HTTP header can carry") as error:
        Client("http://127.0.0.1:9", api_key=key)
    assert key not in str(error.value)


def test_a_server_that_cannot_say_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    fine, failed = {"indexcache": state("FF").to_json()}, {"indexcache": {"error": "KeyError: 'x'"}}
    info = {"internal_states": [fine, fine]}
    monkeypatch.setattr(Client, "server_info", lambda self: info)
    client = Client("http://127.0.0.1:1")
    assert client.states() == [state("FF")] * 2
    info["internal_states"][1] = failed
    with pytest.raises(ServerError, match="cannot say what IndexCache does: KeyError: 'x'"):
        client.states()


def test_a_server_that_is_away_is_told_from_a_url_that_is_wrong() -> None:
    """The first may be asked again; the second never answers."""
    with pytest.raises(ServerUnavailableError, match="cannot reach the server at http"):
        Client(f"http://127.0.0.1:{free_port()}").states()
    with pytest.raises(ServerError, match="cannot reach the server at localhost:1") as error:
        Client("localhost:1").states()
    assert not isinstance(error.value, ServerUnavailableError)
