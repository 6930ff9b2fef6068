"""The benchmarks on real servers: a run from end to end, and the refusals that need one."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_indexcache.bench import latency, replay
from sglang_indexcache.bench.cli import write_latency
from sglang_indexcache.bench.errors import BenchError
from sglang_indexcache.bench.latency import Settings, Target
from sglang_indexcache.bench.results import Configuration, LatencyResult, load
from sglang_indexcache.bench.servers import RunningServers, StartedServers
from sglang_indexcache.bench.stream import stream
from sglang_indexcache.bench.traffic import Mix
from sglang_indexcache.serving import Client, ServerError
from tests.e2e.conftest import Serve, prompt

SHARED = "FSFSFS"
SETTINGS = Settings(lengths=(100, 260), rounds=1, new_tokens=6, watch_seconds=0.0)
POOL = ("--max-total-tokens", "1024", "--chunked-prefill-size", "128")


@pytest.fixture(scope="module")
def target(glm: Path) -> Target:
    return latency.read_target(glm)


@pytest.fixture(scope="module")
def served(target: Target) -> tuple[Configuration, ...]:
    return latency.configurations(("full", f"half={SHARED}"), target.checkpoint)


@pytest.fixture(scope="module")
def live(glm: Path, serve: Serve) -> Iterator[Client]:
    with serve(glm, "--indexcache-mode", "live", *POOL) as client:
        yield client


def test_servers_are_started_in_turns(
    glm: Path, target: Target, served: tuple[Configuration, ...], tmp_path: Path
) -> None:
    servers = StartedServers(str(glm), POOL, tmp_path / "logs")
    result = latency.run(target, servers, served, SETTINGS, arguments=POOL)
    written = write_latency(result, tmp_path, "latency")
    assert load(LatencyResult, written[0]) == result
    index_k = {v.configuration: v.facts.index_k_bytes for v in result.visits}
    assert index_k["full"] == 2 * index_k["half"]  # static mode: no index-K on S layers
    # 1024 slots less 8, pages of 64: 106 tokens take two, 266 take five.
    at_once = {s.length: s.requests for s in result.samples if s.metric == "full"}
    assert at_once == {100: 7, 260: 3}
    for metric in result.metrics:
        for length in result.lengths:
            share = result.indexer_share(metric, length)
            assert share is not None
            assert 0 < share < 1
            speed = result.speedup("half", metric, length)
            assert speed.ideal is not None
            assert 1 < speed.ideal < 2


def test_one_live_server_stands_for_all_patterns(
    live: Client, target: Target, served: tuple[Configuration, ...]
) -> None:
    servers = RunningServers({c.name: live.url for c in served})
    result = latency.run(target, servers, served, SETTINGS)
    assert {v.configuration for v in result.visits} == {"full", "half"}
    assert len(result.samples) == 2 * 2 * 3


def test_a_cached_prompt_is_refused(live: Client) -> None:
    ids = prompt(150, 77)
    live.flush_cache()
    [answer] = stream(live, [ids], 3)
    assert answer.meta["cached_tokens"] == 0
    with pytest.raises(BenchError, match="took 128 of 150 prompt tokens from its cache"):
        stream(live, [ids], 3)


def test_a_prompt_longer_than_the_pool_is_refused(live: Client) -> None:
    with pytest.raises(BenchError, match=r"refused a request: .*2000 tokens"):
        stream(live, [prompt(2000, 1)], 3)


def test_traffic_through_sglangs_own_benchmark(
    live: Client, glm: Path, target: Target, served: tuple[Configuration, ...], tmp_path: Path
) -> None:
    mix = Mix(sessions=4, limit=900, system=64, answer=4, concurrency=1, turns=3.0, seed=0)
    servers = RunningServers({c.name: live.url for c in served})
    result = replay.run(target, glm, servers, served, mix, tmp_path, rounds=1)
    assert len(result.replays) == 2
    for one in result.replays:
        assert len(one.turns) == 3 + 1 + 3 + 5
        assert one.turns[0].cached == 0
        assert all(turn.cached > 0 for turn in one.turns if turn.turn)
        assert 0 < one.hit_rate < 1
    assert replay.replay_grid(result).rows[0][1] == "1.00x"


def test_a_server_that_ignores_the_pattern_is_refused(
    glm: Path, serve: Serve, target: Target, served: tuple[Configuration, ...]
) -> None:
    """And one that dies in the middle of a request."""
    with serve(glm, "--indexcache-pattern", "full", *POOL) as client:
        servers = RunningServers({c.name: client.url for c in served})
        with pytest.raises(BenchError, match="serves FFFFFF on rank 0, not the FSFSFS of half"):
            latency.run(target, servers, served, SETTINGS)
        process = client.server
        killer = threading.Thread(target=lambda: (time.sleep(1.0), process.stop(grace=0.1)))
        killer.start()
        with pytest.raises((BenchError, ServerError)):
            stream(client, [prompt(100, 3)], 800)
        killer.join()
