"""``indexcache server`` against a fake server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sglang_indexcache.ask.client import Client
from sglang_indexcache.cli import app
from sglang_indexcache.library import LayerSlopes, Library, Slopes
from tests.fakes import state
from tests.fakes.server import FakeServer, serving

KEYS = {"api_key": "the-key", "admin_api_key": "the-admin-key"}


def said(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["server", *arguments])
    assert done.exit_code == code, done.output
    return " ".join(done.output.split())


def test_show_and_set_with_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeServer("FFFF", mode="live", **KEYS)
    with serving(fake) as url:
        assert "wants an API key" in said("show", "--url", url, code=1)
        assert "4 of 4 layers" in said("show", "--url", url, "--api-key", KEYS["api_key"])
        monkeypatch.setenv("SGLANG_API_KEY", KEYS["api_key"])
        refused = said("set", "FSFS", "--url", url, code=1)
        assert "/set_internal_state answered 401" in refused
        assert fake.pattern == "FFFF"
        monkeypatch.setenv("SGLANG_ADMIN_API_KEY", KEYS["admin_api_key"])
        assert "2 of 4 layers" in said("set", "FSFS", "--url", url)


def test_doctor_asks_running_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = FakeServer("FSFS", api_key="k"), FakeServer("FSFS", api_key="k")
    with serving(one) as first, serving(other) as second:
        both = ("doctor", "--url", first, "--url", second)
        assert "wants an API key" in said(*both, code=1)
        assert "no problem found" in said(*both, "--api-key", "k")
        assert "leave --tp away" in said(*both, "--api-key", "k", "--tp", "8", code=1)
        other.pattern = "FSSS"
        assert "they differ in the pattern" in said(*both, "--api-key", "k", code=1)


def test_show_proves_skipping(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"indexer_selections": [16, 0], "index_reuses": [0, 16], "forwards": 16}
    states = [state("FS", **counts), state("FS")]
    monkeypatch.setattr(Client, "states", lambda _: states)
    output = said("show")
    assert "indexer ran 16 of 16 forwards in layer 0, 0 of 16 in layer 1: OK" in output
    assert "data-parallel rank 1" in output
    assert "no forward was counted" in output
    assert "switch" not in output  # in static mode there is none
    states[1] = state("FS", **counts | {"indexer_selections": [16, 16], "index_reuses": [0, 0]})
    assert "NOT OK, for layer 1" in said("show", code=1)


def test_show_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"indexer_selections": [16, 0], "index_reuses": [0, 16], "forwards": 16}
    states = [state("FS", **counts, requests={"FS": 2}), state("FS")]
    monkeypatch.setattr(Client, "states", lambda _: states)
    found = json.loads(said("show", "--json"))
    assert {*found} == {"fine", "ranks"}
    first, second = found["ranks"]
    assert {*first} == {
        *("rank", "mode", "source", "pattern", "policy", "adapter", "requests", "obeyed"),
        *("indexers", "uncounted", "index_k", "index_k_bytes_per_token", "overlap"),
    }
    assert (first["obeyed"], second["obeyed"], found["fine"]) == (True, None, True)
    assert (second["rank"], first["requests"]) == (1, {"FS": 2})
    shown = said("show")
    for name in ("source", "indexers", "index_k", "pattern"):
        assert first[name] in shown
    states[1] = state("FS", **counts | {"indexer_selections": [16, 16], "index_reuses": [0, 0]})
    found = json.loads(said("show", "--json", code=1))
    assert (found["fine"], found["ranks"][1]["obeyed"]) == (False, False)


def test_doctor_of_running_servers_as_json() -> None:
    with serving(FakeServer("FSFS", dp=2, plugins=(True, False))) as url:
        found = json.loads(said("doctor", "--json", "--url", url, code=1))
    [problem] = found["problems"]
    assert "its worker did not load the plugin" in problem
    names = ("name", "serves", "sglang", "version", "mode", "pattern")
    assert [{*rank} for rank in found["ranks"]] == [{*names}] * 2
    assert [rank["pattern"] for rank in found["ranks"]] == ["FSFS", None]
    assert found["fine"] is False


def test_doctor_without_arguments() -> None:
    assert "--model-path MODEL" in said("doctor", code=1)


def test_help_shows_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_API_KEY", "the-key")
    text = said("show", "--help")
    assert "SGLANG_API_KEY" in text
    assert "the-key" not in text


@pytest.mark.parametrize("value", ["uniform:1/4", "glm-5-1of4", "full < 32K <= 1/4"])
def test_what_is_no_file_is_the_servers_to_resolve(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    sent: list[str] = []
    monkeypatch.setattr(Client, "switch_pattern", lambda _, value: sent.append(value) or [])
    assert CliRunner().invoke(app, ["server", "set", value]).exit_code == 0
    assert sent == [value]


def test_a_file_is_read_here(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(Client, "switch_pattern", lambda _, value: sent.append(value) or [])
    entry = Library.default().get("glm-5-1of4")
    file = Library.default().folders[0] / "glm-5-1of4.yaml"
    assert CliRunner().invoke(app, ["server", "set", str(file)]).exit_code == 0
    assert sent == [entry.pattern]


def test_a_file_of_slopes_is_sent_as_its_digest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The server compares it with its own, and says whether it folds by these."""
    sent: list[Any] = []
    monkeypatch.setattr(Client, "switch_pattern", lambda _, value: sent.append(value) or [])
    layers = (LayerSlopes(slopes=(0.5,), missed={}),) * 2
    about = {"name": "any", "architecture": "Any", "checkpoint": "0" * 64, "layers": layers}
    slopes = Slopes(**about, path=tmp_path / "some.slopes")
    slopes.write()
    entry = tmp_path / "mine.yaml"
    library = Library.default().folders[0] / "glm-5-1of4.yaml"
    entry.write_text(library.read_text())
    for asked in (f"folded@{slopes.path}", f"{entry}+c4@{slopes.path}"):
        assert CliRunner().invoke(app, ["server", "set", asked]).exit_code == 0
    pattern = Library.default().get("glm-5-1of4").pattern
    assert sent == [f"folded@{slopes.digest}", f"{pattern}+c4@{slopes.digest}"]
    assert CliRunner().invoke(app, ["server", "set", "folded@none.slopes"]).exit_code == 1
