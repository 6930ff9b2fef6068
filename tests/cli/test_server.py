"""``indexcache server`` against a fake server."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from sglang_indexcache.lab.client.http import Client
from sglang_indexcache.library.resolve import Library
from sglang_indexcache.serving.protocol import STATE, RankState
from tests.cli import output_of
from tests.fakes import state
from tests.fakes.server import FakeServer, serving

KEYS = {"api_key": "the-key", "admin_api_key": "the-admin-key"}


server = partial(output_of, "server")


def test_show_and_set_with_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeServer("FFFF", mode="live", **KEYS)
    with serving(fake) as url:
        assert "wants an API key" in server("show", "--url", url, code=1)
        assert "4 of 4 layers" in server("show", "--url", url, "--api-key", KEYS["api_key"])
        monkeypatch.setenv("SGLANG_API_KEY", KEYS["api_key"])
        refusal = server("set", "FSFS", "--url", url, code=1)
        assert "/set_internal_state answered 401" in refusal
        assert fake.pattern == "FFFF"
        monkeypatch.setenv("SGLANG_ADMIN_API_KEY", KEYS["admin_api_key"])
        assert "2 of 4 layers" in server("set", "FSFS", "--url", url)


def reporting(states: list[RankState]) -> Callable[[Client], dict[str, Any]]:
    """Return an answer of ``/server_info`` with these states."""
    reports = [{STATE: state.to_json() | {"rank": rank}} for rank, state in enumerate(states)]
    return lambda _: {"version": "0.5.23", "internal_states": reports}


def test_show_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"indexer_selections": [16, 0], "index_reuses": [0, 16], "forwards": 16}
    states = [state("FS", **counts, requests={"FS": 2}), state("FS")]
    monkeypatch.setattr(Client, "server_info", reporting(states))
    report = json.loads(server("show", "--json"))
    assert {*report} == {"fine", "problems", "ranks"}
    first, second = report["ranks"]
    assert {*first} == {
        *(
            "rank",
            "version",
            "mode",
            "source",
            "pattern",
            "policy",
            "adapter",
            "requests",
            "obeyed",
        ),
        *(
            "server",
            "sglang",
            "indexers",
            "uncounted",
            "index_k",
            "index_k_bytes_per_token",
            "row_split",
            "skipped",
            "kernel_choices",
        ),
    }
    assert (first["obeyed"], second["obeyed"], report["fine"]) == (True, None, True)
    assert (second["rank"], first["requests"]) == (1, {"FS": 2})
    output = server("show")
    for name in ("source", "indexers", "index_k", "pattern"):
        assert first[name] in output
    states[1] = state("FS", **counts | {"indexer_selections": [16, 16], "index_reuses": [0, 0]})
    monkeypatch.setattr(Client, "server_info", reporting(states))
    report = json.loads(server("show", "--json", code=1))
    assert (report["fine"], report["ranks"][1]["obeyed"]) == (False, False)


def test_a_router_is_told_apart_from_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers /server_info in its own way, and hid every other server once."""
    monkeypatch.setattr(Client, "server_info", lambda _: {"model_path": "x"})
    report = json.loads(server("show", "--json", code=1))
    [problem] = report["problems"]
    assert "has no internal_states and version): give each server's own URL" in problem


def test_help_shows_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_API_KEY", "the-key")
    text = server("show", "--help")
    assert "SGLANG_API_KEY" in text
    assert "the-key" not in text


@pytest.mark.parametrize("value", ["uniform:1/4", "glm-5-1of4", "full < 32K <= 1/4"])
def test_what_is_no_file_is_the_servers_to_resolve(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    values: list[str] = []
    monkeypatch.setattr(Client, "switch_pattern", lambda _, value: values.append(value) or [])
    assert server("set", value) == ""
    assert values == [value]


def test_a_file_is_read_here(monkeypatch: pytest.MonkeyPatch) -> None:
    values: list[Any] = []
    monkeypatch.setattr(Client, "switch_pattern", lambda _, value: values.append(value) or [])
    entry = Library.default().get("glm-5-1of4")
    file = Library.default().folders[0] / "glm-5-1of4.yaml"
    assert server("set", file) == ""
    assert values == [entry.pattern]
