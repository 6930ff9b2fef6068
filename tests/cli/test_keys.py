"""No command prints or stores a key, which SGLang's ``/server_info`` shows to whoever has one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli import output_of
from tests.cli.test_bench import folder
from tests.cli.test_eval import SMALL
from tests.cli.test_search import TINY, documents
from tests.fakes.server import FakeServer, serving
from tests.lab.evaluate.fake_server import Fake
from tests.lab.latency.test_measure import CONFIG

KEYS = {"api_key": "the-first-secret", "admin_api_key": "the-second-secret"}


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, key in KEYS.items():
        monkeypatch.setenv(f"SGLANG_{name.upper()}", key)


def check(server: FakeServer, folder: Path, *command: str | Path) -> list[Path]:
    """Run a command against a server, and find no key in what it prints and leaves behind."""
    with serving(server) as url:
        output = output_of(*command, "--url", url)
    files = [path for path in folder.rglob("*") if path.is_file()]
    for key in KEYS.values():
        assert key not in output
        assert not [path for path in files if key.encode() in path.read_bytes()]
    return files


@pytest.mark.parametrize("command", ["show", "set FSFS"])
def test_server(tmp_path: Path, command: str) -> None:
    check(FakeServer("FFFF", mode="live", **KEYS), tmp_path, "server", *command.split())


def test_eval(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert check(Fake(**KEYS), out, "eval", "run", "1/4", *SMALL, "-o", out)


def test_bench(tmp_path: Path) -> None:
    model, out = folder(tmp_path, CONFIG), tmp_path / "out"
    patterns = ("--pattern", "full", "--pattern", "half=uniform:1/2")
    command = ("bench", "latency", "--model", model, *patterns, "--context", "256", "-o", out)
    server = FakeServer("F" * 8, mode="live", **KEYS)
    assert check(server, out, *command, "--rounds", "1", "--new-tokens", "6")


def test_search(tmp_path: Path) -> None:
    data, out = documents(tmp_path / "data.jsonl"), tmp_path / "out"
    server = FakeServer("F" * 12, "live", **KEYS)
    command = ("--model", TINY, "--data", data, "--batches", "2", "--held-out", "2")
    command = ("search", "run", *command, "--target", "11", "--method", "greedy", "-o", out)
    assert check(server, out, *command)
