"""The benchmarks on real servers: a run from end to end, and the refusals that need one.

A run starts two static servers, one after the other; a third, in live mode, stands for both of
them and then has to be refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_indexcache.errors import ServerError
from sglang_indexcache.lab.client.http import Client
from sglang_indexcache.lab.client.stream import stream
from sglang_indexcache.lab.latency import measure
from sglang_indexcache.lab.latency.measure import Settings, TargetModel
from sglang_indexcache.lab.latency.results import Configuration, LatencyResult, configurations
from sglang_indexcache.lab.latency.servers import RunningServers, StartedServers
from tests.e2e.conftest import Serve, prompt
from tests.preloaded import PreloadedServer

SHARED = "FSFSFS"
SETTINGS = Settings(lengths=(100, 260), rounds=1, new_tokens=6, watch_seconds=0.0)
POOL = ("--max-total-tokens", "1024", "--chunked-prefill-size", "128")


@pytest.fixture(scope="module")
def target(glm: Path) -> TargetModel:
    return measure.read_target(glm)


@pytest.fixture(scope="module")
def configured(target: TargetModel) -> tuple[Configuration, ...]:
    return configurations(("full", f"half={SHARED}"), target.checkpoint)


def test_servers_one_at_a_time(
    glm: Path,
    target: TargetModel,
    configured: tuple[Configuration, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sglang_indexcache.lab.latency.servers.Server", PreloadedServer)
    servers = StartedServers(str(glm), POOL, tmp_path / "logs")
    result = measure.run(target, servers, configured, SETTINGS, tmp_path, arguments=POOL)
    files = measure.write_latency(result, tmp_path)
    assert LatencyResult.model_validate_json(files[0].read_text()) == result
    assert {v.facts.mode for v in result.visits} == {"static"}
    index_k = {v.configuration: v.facts.index_k_bytes for v in result.visits}
    assert index_k["full"] == 2 * index_k["half"]  # static mode: no index-K on S layers
    # 1024 slots less 8, pages of 64: 106 tokens take two, 266 take five.
    at_once = {s.length: s.requests for s in result.samples if s.metric == "full"}
    assert at_once == {100: 7, 260: 3}
    for metric in result.metrics:
        for length in result.lengths:
            share = result.indexer_share(metric, length)
            speed = result.speedup("half", metric, length)
            # Only a first token cannot come before its indexers; the few decode steps may bunch up.
            if metric == "prefill" or share is not None:
                assert share is not None
                assert speed.ideal is not None
                assert 0 < share < 1 < speed.ideal < 2


@pytest.fixture(scope="module")
def live(glm: Path, serve: Serve) -> Iterator[Client]:
    with serve(glm, "--indexcache-mode", "live", *POOL) as client:
        yield client


def test_one_live_server_stands_for_all_patterns(
    live: Client, target: TargetModel, configured: tuple[Configuration, ...], tmp_path: Path
) -> None:
    running = RunningServers({c.name: live for c in configured})
    result = measure.run(target, running, configured, SETTINGS, tmp_path)
    [state] = live.states()
    assert (state.pattern, state.switches) == ("FFFFFF", 0)
    assert [(v.configuration, v.facts.mode) for v in result.visits] == [
        ("full", "live"), ("half", "live"),
    ] * 4  # fmt: skip
    assert len(result.samples) == 2 * 2 * 3
    shares = [s.indexer_share for s in result.samples if s.metric == "prefill"]
    assert shares
    assert all(shares)


def test_a_cached_prompt_is_refused(live: Client) -> None:
    ids = prompt(150, 77)
    live.flush_cache()
    [answer] = stream(live, [ids], 3)
    assert answer.meta["cached_tokens"] == 0
    with pytest.raises(ServerError, match="took 128 of 150 prompt tokens from its cache"):
        stream(live, [ids], 3)


def test_a_prompt_longer_than_the_pool_is_refused(live: Client) -> None:
    with pytest.raises(ServerError, match=r"refused a request: .*2000 tokens"):
        stream(live, [prompt(2000, 1)], 3)
