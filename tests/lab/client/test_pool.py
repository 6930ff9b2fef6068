"""Servers that fail over real sockets: what is tried again, what is not, and what is told."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_indexcache.errors import (
    IndexCacheError,
    ServerError,
    ServerUnavailableError,
)
from sglang_indexcache.lab.client import pool as pool_module
from sglang_indexcache.lab.client import score as score_module
from sglang_indexcache.lab.client.http import Client
from sglang_indexcache.lab.client.launch import free_port
from sglang_indexcache.lab.client.pool import Pool
from sglang_indexcache.lab.search.calibration import Calibration
from sglang_indexcache.lab.search.evaluators import ServedEvaluator
from sglang_indexcache.lab.search.ledger import Ledger, open_journal
from sglang_indexcache.pattern import Pattern
from tests.fakes.server import FakeServer, serving

DATA = Calibration(((1, 2, 3), (4, 5, 6, 7, 8), (7, 8, 9), (3, 2, 1)), "test")
PATTERN = Pattern("FSFS")
LAYERS = 4


def live(layers: int = LAYERS, **fields: Any) -> FakeServer:
    return FakeServer("F" * layers, **{"mode": "live", **fields})


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(pool_module, "LONGEST_PAUSE", 0.05)


def expected(pattern: Pattern = PATTERN) -> list[float]:
    with serving(live()) as url:
        return list(ServedEvaluator(Pool([Client(url)]), DATA).loss(pattern, range(4)))


def pool_of(stack: ExitStack, *engines: FakeServer, **arguments: Any) -> ServedEvaluator:
    clients = [Client(stack.enter_context(serving(engine))) for engine in engines]
    return ServedEvaluator(Pool(clients, **arguments), DATA)


@pytest.mark.parametrize(
    "fault", ["500", "502", "503", "429", "reset", "cut", "half json", "slow", "abort"]
)
def test_what_may_get_better_is_tried_again_and_told(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    engine, lines = live(), list[str]()
    if fault == "slow":
        monkeypatch.setattr(score_module, "_LEAST_SECONDS", 0.3)
    pool = pool_of(stack, engine, tell=lines.append)
    engine.faults = [fault, fault]
    assert list(pool.loss(PATTERN, range(4))) == expected()
    assert engine.calls == 3
    again, once_more, back = lines
    assert "is asked again in 0 s: " in again
    assert "is asked again in 0 s: " in once_more
    assert back.endswith("answers again")
    assert fault != "slow" or "did not answer /generate within 0.3" in again
    assert pool.loss(PATTERN, [0])[0] == expected()[0]
    assert len(lines) == 3


def test_a_server_that_still_loads_is_waited_for(stack: ExitStack) -> None:
    engine = live()
    pool = pool_of(stack, engine, tell=lambda line: None)
    engine.faults = ["deaf"] * 4
    assert list(pool.loss(PATTERN, range(4))) == expected()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("400", "answered 400: .*a fault"),
        ("401", "wants an API key"),
        ("403", "forbids this"),
        ("deaf to names", "asked for pattern .* and answered under FFFF"),
        ("another checkpoint", "restarted with another checkpoint: .* FSSS, before it was .* FFFF"),
    ],
)
def test_what_will_not_get_better_ends_at_once(stack: ExitStack, fault: str, message: str) -> None:
    engine, lines = live(), list[str]()
    pool = pool_of(stack, engine, tell=lines.append)
    engine.faults = [fault]
    with pytest.raises(IndexCacheError, match=message):
        pool.loss(PATTERN, [0])
    assert (engine.calls, lines) == (1, [])


def test_a_server_restarted_between_two_calls_is_checked(stack: ExitStack) -> None:
    engine = live()
    pool = pool_of(stack, engine)
    first = list(pool.loss(PATTERN, range(4)))
    engine.restart()
    assert list(pool.loss(PATTERN, range(4))) == first
    engine.mode = "static"
    with pytest.raises(ServerError, match="static mode"):
        pool.loss(PATTERN, [0])


def test_a_call_goes_to_another_server(stack: ExitStack) -> None:
    engines, lines = [live(), live(), live()], list[str]()
    pool = pool_of(stack, *engines, tell=lines.append)
    engines[0].faults = ["reset"] * 1000
    for _ in range(5):
        assert list(pool.loss(PATTERN, range(4))) == expected()
    assert engines[1].calls + engines[2].calls == 5
    assert all(line.startswith("the server at http://127.0.0.1:") for line in lines)


def test_the_search_ends_when_all_stay_away(stack: ExitStack) -> None:
    engines = [live(), live()]
    pool = pool_of(stack, *engines, tell=lambda line: None, patience=1.0)
    for engine in engines:
        engine.faults = ["503"] * 1000
    with pytest.raises(ServerError, match=r"answered 503.* start the same command again"):
        pool.loss(PATTERN, [0])
    assert min(engine.calls for engine in engines) > 1


def test_one_of_several_may_be_away_at_the_start_but_not_all(stack: ExitStack) -> None:
    nobody, lines = f"http://127.0.0.1:{free_port()}", list[str]()
    url = stack.enter_context(serving(live()))
    pool = ServedEvaluator(Pool([Client(nobody), Client(url)], tell=lines.append), DATA)
    assert pool.num_layers == LAYERS
    assert list(pool.loss(PATTERN, range(4))) == expected()
    assert nobody in lines[0]
    with pytest.raises(ServerUnavailableError, match="cannot reach the server"):
        Pool([Client(nobody)])


def test_servers_that_do_not_belong_together(stack: ExitStack) -> None:
    message = r"the same checkpoint; one has .* FFFF, the server at http\S* .*FFFFF"
    with pytest.raises(ServerError, match=message):
        pool_of(stack, live(), live(LAYERS + 1))
    with pytest.raises(ServerError, match="--indexcache-mode live"):
        pool_of(stack, live(), live(mode="static"))


@pytest.mark.parametrize("count", [1, 3])
def test_a_retried_call_is_in_the_journal_once(
    stack: ExitStack, tmp_path: Path, count: int
) -> None:
    engines = [live() for _ in range(count)]
    pool = pool_of(stack, *engines, tell=lambda line: None)
    for engine, fault in zip(engines, cycle(["reset", "503"]), strict=False):
        engine.faults = ["", fault, "cut"]
    patterns = [Pattern(text) for text in ("FFFF", "FSFF", "FSSF", "FSSS", "FFSS", "FFFS")]
    with open_journal(tmp_path / "j", {}) as journal:
        losses = Ledger(pool, journal, call_tokens=1).many(patterns)
    assert losses.shape == (6, 4)
    assert np.array_equal(losses, [expected(pattern) for pattern in patterns])
    with open_journal(tmp_path / "j", {}) as journal:
        cells = [(e["pattern"], batch) for e in journal.entries for batch in e["batches"]]
    assert len(cells) == len(set(cells)) == 24


def test_a_server_has_as_many_calls_at_once_as_it_may(stack: ExitStack) -> None:
    """The calls are of several patterns, and each gets what it gets alone."""
    engines = [live(gathers=3) for _ in range(2)]
    pool = pool_of(stack, *engines, at_once=3)
    patterns = [Pattern(text) for text in ("FFFF", "FSFF", "FSSF")]
    losses = Ledger(pool, call_tokens=1).many(patterns)
    assert np.array_equal(losses, [expected(pattern) for pattern in patterns])
    assert [engine.most_at_once for engine in engines] == [3, 3]
    assert sum(engine.calls for engine in engines) == 12


def test_calls_that_fail_together_are_told_once(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "FIRST_PAUSE", 0.5)
    monkeypatch.setattr(pool_module, "LONGEST_PAUSE", 0.5)
    engine, lines = live(gathers=4), list[str]()
    pool = pool_of(stack, engine, at_once=4, tell=lines.append)
    engine.faults = ["503"] * 4
    assert list(Ledger(pool, call_tokens=1).losses(PATTERN)) == expected()
    assert engine.calls == 8
    assert ["is asked again in" in line for line in lines] == [True, False]


def test_no_call_at_once_is_no_way_to_ask() -> None:
    with pytest.raises(ServerError, match="at least one call at a time, got 0"):
        Pool([], at_once=0)


@pytest.mark.parametrize("count", [1, 2])
def test_ctrl_c_ends_a_pause_at_once(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr(pool_module, "FIRST_PAUSE", 3600.0)
    monkeypatch.setattr(pool_module, "LONGEST_PAUSE", 3600.0)
    # A shell's background job, and so its tests, ignore the signal otherwise.
    stack.callback(signal.signal, signal.SIGINT, signal.getsignal(signal.SIGINT))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main = threading.main_thread().ident
    assert main is not None
    pauses = threading.Semaphore(0)

    def interrupt() -> None:
        for _ in range(count):
            pauses.acquire()
        time.sleep(0.3)  # until the pause has begun
        signal.pthread_kill(main, signal.SIGINT)

    engines = [live() for _ in range(count)]
    pool = pool_of(stack, *engines, tell=lambda line: pauses.release())
    for engine in engines:
        engine.faults = ["503"]
    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        Ledger(pool).many([PATTERN, Pattern("FFFF")])
