"""A server in trouble: its memory runs out, a rank stands still, a process of it is killed."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from sglang_indexcache.errors import ServerError
from sglang_indexcache.lab.client.http import Client
from sglang_indexcache.lab.client.launch import Server
from tests.e2e.conftest import Serve, prompt
from tests.e2e.test_parallel import TWO_RANKS, schedulers
from tests.e2e.test_requests import Ask, check_greedy, send, wait_until_idle
from tests.oracle import Oracle
from tests.signals import group_members

PATTERNS = ("FFFFFF", "FFSSFS", "FSSFSS", "FSSSSS")
SEED = 20261126


@pytest.fixture(scope="module")
def oracle(glm: Path) -> Oracle:
    return Oracle(glm, torch.float32)


@pytest.fixture(scope="module")
def crowded(glm: Path, serve: Serve) -> Iterator[Client]:
    """Yield two ranks whose pool holds a third of what is asked of them at once.

    SGLang admits a request if its prompt and this many new tokens fit, so that it has to take
    memory back from requests which go on for longer.
    """
    arguments = ["--tp", "2", "--dtype", "float32", "--indexcache-mode", "live"]
    arguments += ["--max-total-tokens", "2560", "--chunked-prefill-size", "256"]
    environment = {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "16"}
    with serve(glm, *arguments, **TWO_RANKS, **environment) as client:
        yield client


def answer(client: Client, oracle: Oracle, asks: list[Ask]) -> Counter[str]:
    """Ask all at once, hold every answer against its own pattern, and count what happened."""
    with ThreadPoolExecutor(len(asks)) as pool:
        replies = list(pool.map(lambda ask: send(client, ask), asks))
    tally: Counter[str] = Counter()
    for ask, reply in zip(asks, replies, strict=True):
        check_greedy(oracle, ask, reply, tally)
        tally["retracted"] += reply["meta_info"]["num_retractions"] > 0
    wait_until_idle(client)
    return tally


def test_a_retraction_keeps_each_requests_pattern(crowded: Client, oracle: Oracle) -> None:
    """A request that gave its memory back is computed again, under its own pattern."""
    generator = random.Random(SEED)
    asks = [
        Ask(prompt(330, number), PATTERNS[number % 4], generator.randrange(60, 90), False)
        for number in range(14)
    ]
    tally = answer(crowded, oracle, asks)
    assert tally["retracted"] > 0, tally
    assert tally["equal token for token"] > 11, tally


def test_a_rank_that_stood_still_goes_on(crowded: Client, oracle: Oracle) -> None:
    """Its group waits for it, and every answer is as if nothing had been."""
    server: Server = crowded.server  # type: ignore[attr-defined]
    _, victim = schedulers(server.pid)
    is_stopped = threading.Event()

    def stop() -> None:
        while not any(state.requests for state in crowded.states()):
            time.sleep(0.05)
        os.kill(victim, signal.SIGSTOP)
        time.sleep(3)
        is_stopped.set()
        os.kill(victim, signal.SIGCONT)

    asks = [Ask(prompt(150, number), name, 120, False) for number, name in enumerate(PATTERNS)]
    stopping = threading.Thread(target=stop)
    stopping.start()
    try:
        tally = answer(crowded, oracle, asks)
    finally:
        stopping.join(60)
    assert is_stopped.is_set()
    assert tally["equal token for token"] == len(asks), tally


def test_a_killed_detokenizer_ends_the_server(crowded: Client) -> None:
    """The last that is asked of this one."""
    server: Server = crowded.server  # type: ignore[attr-defined]
    check_end(crowded, server.pid, detokenizer(server.pid))


def test_a_killed_http_process_ends_the_server(glm: Path, serve: Serve) -> None:
    with serve(glm, "--indexcache-mode", "live", "--max-total-tokens", "8192") as client:
        check_end(client, client.server.pid, client.server.pid)


def check_end(client: Client, group: int, victim: int) -> None:
    """Clients hear of a kill, and no process of the server is left that holds memory."""
    chunks = client.stream(
        input_ids=prompt(100, 1), sampling_params={"max_new_tokens": 2000, "ignore_eos": True}
    )
    next(chunks)
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(ServerError):
        deque(chunks, maxlen=0)
    deadline = time.monotonic() + 60
    while (remaining := group_members(group)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not remaining


def detokenizer(group: int) -> int:
    """Return the process of a server that turns tokens into text."""
    [process] = [
        member
        for member in group_members(group)
        if b"detokenizer" in Path(f"/proc/{member}/cmdline").read_bytes()
    ]
    return process
