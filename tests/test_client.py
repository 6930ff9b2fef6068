"""Starting a server: its port."""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path

import pytest

from sglang_indexcache import client as serving
from sglang_indexcache.client import Client, Server, free_port
from sglang_indexcache.errors import ServerError


def test_a_free_port_is_below_those_of_outgoing_connections() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(20):
        port = free_port()
        assert 1024 < port < first
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))


def test_a_port_in_use_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(serving, "_PORTS", range(port, port + 100))
        assert free_port() != port
    monkeypatch.setattr(serving.random, "sample", lambda population, count: [])
    with pytest.raises(ServerError, match="no free port"):
        free_port()


def test_a_server_whose_port_was_taken_is_given_up_at_once(tmp_path: Path) -> None:
    """SGLang's process stays when its HTTP server cannot listen."""
    server = Server([], tmp_path / "log", port=29999)
    said = "ERROR: [Errno 98] error while attempting to bind: address already in use"
    server.command = [
        sys.executable,
        "-c",
        f"import time; print({said!r}, flush=True); time.sleep(60)",
    ]
    started = time.monotonic()
    with server, pytest.raises(ServerError, match="port 29999 is in use"):
        server.wait_until_ready()
    assert time.monotonic() - started < 40


def test_without_sglang_no_server_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError) as raised:
        Server([], tmp_path / "log").start()
    assert raised.value.name == "sglang"  # from which the command line says what to install
    assert not (tmp_path / "log").exists()


def test_a_server_that_cannot_say_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    fine, failed = {"indexcache": {"pattern": "FF"}}, {"indexcache": {"error": "KeyError: 'x'"}}
    info = {"internal_states": [fine, fine]}
    monkeypatch.setattr(Client, "server_info", lambda self: info)
    client = Client("http://127.0.0.1:1")
    assert client.states() == [{"pattern": "FF"}] * 2
    info["internal_states"][1] = failed
    with pytest.raises(ServerError, match="cannot say what IndexCache does: KeyError: 'x'"):
        client.states()
