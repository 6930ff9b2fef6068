"""A search over servers that are killed: the files of an undisturbed search on one of them."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

import sglang_indexcache
from sglang_indexcache.lab.client import pool
from sglang_indexcache.lab.client.http import Client
from sglang_indexcache.lab.client.launch import free_port
from sglang_indexcache.lab.client.pool import Pool
from sglang_indexcache.lab.search.evaluators import ServedEvaluator
from sglang_indexcache.lab.search.methods import METHODS
from sglang_indexcache.lab.search.rules import Constraints, parse_targets
from sglang_indexcache.lab.search.session import run_search
from sglang_indexcache.lab.search.setup import Setup
from tests.fakes.server import FakeServer, serving
from tests.lab.search.test_resume import evaluations, results

PACKAGE = Path(sglang_indexcache.__file__).parent
TINY, TEXT = PACKAGE / "lab" / "demo" / "tiny-dsa", PACKAGE / "lab" / "search"
LAYERS = 12


class Process:
    """A fake engine in a process of its own, at the same port in each of its lives."""

    def __init__(self, seconds: float) -> None:
        self.port, self._seconds = free_port(), seconds
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "tests.fakes.server"]
        arguments = map(str, (self.port, LAYERS, self._seconds))
        self._process = subprocess.Popen([*command, *arguments], cwd=Path(__file__).parents[3])
        client = Client(f"http://127.0.0.1:{self.port}")
        while not client.is_ready():
            assert self._process.poll() is None
            time.sleep(0.02)

    def hold(self) -> None:
        """Take calls, and answer none until :meth:`go_on`."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def search(ports: Sequence[int], output: Path, lines: list[str], at_once: int = 1) -> None:
    clients = tuple(Client(f"http://127.0.0.1:{port}") for port in ports)
    setup = replace(Setup.read(TINY, str(TEXT), context=128, batches=8, held_out=2), name="x")
    engines = Pool(clients, at_once=at_once, tell=lines.append)
    evaluator = ServedEvaluator(engines, setup.calibration)
    rules = Constraints.make(setup.checkpoint.own)
    goals = parse_targets(["1/2", "1/4"], rules)
    with (output.parent / f"{output.name}.log").open("w") as log:
        run_search(setup, evaluator, goals, METHODS["greedy"], output, Console(file=log))


def test_several_calls_at_once_find_the_same(tmp_path: Path) -> None:
    """The YAML is the same byte for byte, whatever the number."""
    for at_once in (1, 3):
        engine = FakeServer("F" * LAYERS, "live", gathers=at_once)
        with serving(engine) as url:
            search([int(url.rpartition(":")[2])], tmp_path / str(at_once), [], at_once)
        assert engine.most_at_once == at_once
    assert list(results(tmp_path / "1")) == ["x-1of2.yaml", "x-1of4.yaml"]
    assert results(tmp_path / "3") == results(tmp_path / "1")
    assert set(evaluations(tmp_path / "3")) == set(evaluations(tmp_path / "1"))


def test_one_of_three_servers_is_killed_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others answer nothing while it is away, so the search cannot end before it is back."""
    monkeypatch.setattr(pool, "FIRST_PAUSE", 0.05)
    monkeypatch.setattr(pool, "LONGEST_PAUSE", 0.05)
    alone, three = tmp_path / "alone", tmp_path / "three"
    servers = [Process(0.0), Process(0.05), Process(0.05), Process(0.05)]
    victim, survivors = servers[2], (servers[1], servers[3])
    sentences: list[str] = []
    kills: list[int] = []

    def kill_twice() -> None:
        journal = three / "journal.jsonl"
        for lines in (20, 60):
            while not journal.exists() or journal.read_bytes().count(b"\n") < lines:
                time.sleep(0.01)
            for server in survivors:
                server.hold()
            victim.kill()
            kills.append(lines)
            victim.start()
            for server in survivors:
                server.go_on()

    try:
        search([servers[0].port], alone, sentences)
        assert sentences == []
        killer = threading.Thread(target=kill_twice, daemon=True)
        killer.start()
        search([server.port for server in servers[1:]], three, sentences)
        killer.join(60)
    finally:
        for server in servers:
            server.kill()
    assert kills == [20, 60]
    assert list(results(three)) == ["x-1of2.yaml", "x-1of4.yaml"]
    assert results(three) == results(alone)
    entries = evaluations(three)
    assert sorted(entries) == sorted(evaluations(alone))
    name = f"the server at http://127.0.0.1:{victim.port}"
    assert all(line.startswith(f"{name} ") for line in sentences)
    assert f"{name} answers again" in sentences
