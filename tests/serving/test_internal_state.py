"""Report and switch inside the scheduler: whatever goes wrong there must not end the server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving import internal_state, process
from tests.serving.plans import plan

PLAN = plan("FFFF", mode="live")


def scheduler() -> SimpleNamespace:
    """SGLang's scheduler as far as a switch looks into it."""
    return SimpleNamespace(is_fully_idle=lambda: True)


@pytest.fixture
def disagg() -> SimpleNamespace:
    return SimpleNamespace(disaggregation_mode="null")


@pytest.fixture(autouse=True)
def serving(monkeypatch: pytest.MonkeyPatch, disagg: SimpleNamespace) -> process.ServingProcess:
    monkeypatch.setattr(process, "_process", None)
    bag = SimpleNamespace(pp_size=1, dp_rank=None, attn_dp_rank=1)
    monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda: bag)
    monkeypatch.setattr("sglang.srt.runtime_context.get_disagg", lambda: disagg)
    return process.activate(PLAN)


def report(engine: SimpleNamespace) -> Any:
    output = SimpleNamespace(internal_state={})
    internal_state._report(output, SimpleNamespace(scheduler=engine), None)
    return output.internal_state["indexcache"]


def ask(engine: SimpleNamespace, *keys: str) -> bool:
    """Return what ``/set_internal_state`` answers."""
    request = SimpleNamespace(server_args=dict.fromkeys(keys, 1))
    controller = SimpleNamespace(scheduler=engine)
    return bool(internal_state._accept(lambda *_: None, controller, request).updated)


@pytest.mark.parametrize("is_hybrid", [False, True])
def test_the_report_counts_what_is_allocated(
    serving: process.ServingProcess, is_hybrid: bool
) -> None:
    config = {"index_topk": 64, "index_n_heads": 8, "index_head_dim": 128}
    keys = SimpleNamespace(buffer=[torch.zeros(128)])
    pool = SimpleNamespace(index_buf_size=96, page_size=32, index_key_cache=keys)
    serving.traffic.look_at(
        serving.plan,
        SimpleNamespace(
            layer_info=SimpleNamespace(start_layer=0, end_layer=3),
            model_config=SimpleNamespace(hf_config=SimpleNamespace(**config)),
            token_to_kv_pool=SimpleNamespace(full_kv_pool=pool) if is_hybrid else pool,
        ),
    )
    assert (serving.traffic.topk, serving.traffic.flops) == (64, 2 * 8 * 128)
    assert serving.traffic.own == {0, 1, 2}
    state = report(scheduler())
    assert state["pattern"] == "FFFF"
    assert state["index_k_bytes_per_token"] == 4
    assert state["stage"] == [0, 3]  # another stage has the last layer, and counts it


def test_a_report_that_fails_is_an_answer(
    serving: process.ServingProcess, caplog: pytest.LogCaptureFixture
) -> None:
    serving.policy = None  # type: ignore[assignment]
    state = report(scheduler())
    assert state.keys() == {"error"}
    assert "AttributeError: 'NoneType' object has no attribute" in state["error"]
    assert "Traceback" in caplog.text


def test_a_switch_that_fails_is_an_answer(
    serving: process.ServingProcess, caplog: pytest.LogCaptureFixture, disagg: SimpleNamespace
) -> None:
    disagg.disaggregation_mode = "decode"
    engine = scheduler()
    engine.is_fully_idle = None  # not what SGLang has there
    assert not ask(engine, "indexcache_pattern=FSFS")
    assert serving.last_rejection.startswith("TypeError: ")
    assert str(serving.pattern) == "FFFF"
    assert "Traceback" in caplog.text
    assert ask(scheduler(), "indexcache_pattern=FSFS")
    assert str(serving.pattern) == "FSFS"


def test_two_nodes_switch_only_when_idle(
    serving: process.ServingProcess, disagg: SimpleNamespace
) -> None:
    engine = scheduler()
    engine.is_fully_idle = lambda: False
    assert ask(engine, "indexcache_pattern=FSFS")  # one node at any time
    disagg.disaggregation_mode = "prefill"
    assert ask(engine, "indexcache_pattern=FSFS")  # what it has already
    assert serving.switches == 1
    assert not ask(engine, "indexcache_pattern=FFFS")
    assert "prefilled under one pattern and decoded under the other" in serving.last_rejection
    assert str(serving.pattern) == "FSFS"


def test_a_switch_with_another_value_is_none(serving: process.ServingProcess) -> None:
    request = SimpleNamespace(server_args={"indexcache_pattern=FSFS": 0})
    controller = SimpleNamespace(scheduler=scheduler())
    assert not internal_state._accept(lambda *_: None, controller, request).updated
    assert 'the value must be 1: {"indexcache_pattern=FSFS": 1}' in serving.last_rejection


def test_counters_rise_through_a_switch(serving: process.ServingProcess) -> None:
    """The counters tell afterwards what was served under each pattern."""
    first, second = Pattern("FSFS"), Pattern("FFSS")
    for rows in ({first: 3}, {second: 1, first: 2}, {first: 1}):
        serving.count_forward(
            "prefill", [(pattern, count, count) for pattern, count in rows.items()]
        )
        serving.count_layer(0, is_full=True)
        serving.count_layer(3, is_full=False)
        serving.count_key_write(1)
        serving.count_graph("decode")
        assert ask(scheduler(), f"indexcache_pattern={first if len(rows) > 1 else second}")
    reported = report(scheduler())
    assert serving.switches == 3
    assert (reported["forwards"], reported["mixed_forwards"]) == (3, 1)
    assert reported["tokens"] == {"prefill FSFS": 6, "prefill FFSS": 1}
    assert reported["indexer_selections"] == [3, 0, 0, 0]
    assert reported["index_reuses"] == [0, 0, 0, 3]
    assert reported["index_key_writes"] == [0, 3, 0, 0]
    assert reported["graph_replays"] == {"decode": 3}


def test_an_idle_rank_serves_no_pattern(serving: process.ServingProcess) -> None:
    """It keeps step with ranks that have requests, and what its layers do there is no sharing."""
    serving.count_forward("decode", [], idle=True)
    serving.count_layer(0, is_full=True)
    serving.count_layer(1, is_full=False)
    serving.count_key_write(1)
    serving.count_graph("decode")
    reported = report(scheduler())
    assert (reported["idle_forwards"], reported["forwards"], reported["mixed_forwards"]) == (
        1,
        0,
        0,
    )
    assert reported["tokens"] == reported["graph_replays"] == {}
    assert (
        sum(
            reported["indexer_selections"] + reported["index_reuses"] + reported["index_key_writes"]
        )
        == 0
    )


def test_a_switch_may_be_by_prompt_length(serving: process.ServingProcess) -> None:
    assert ask(scheduler(), "indexcache_pattern=full < 1K <= FSFS")
    assert str(serving.policy) == "FFFF < 1K <= FSFS"
    assert report(scheduler())["policy"] == "FFFF < 1K <= FSFS"
    assert report(scheduler())["pattern"] == "FFFF"
    assert serving.switches == 1
    assert not ask(scheduler(), "indexcache_pattern=full < 1K <= nobody")
    assert "no pattern is called 'nobody'" in serving.last_rejection
    assert serving.switches == 1


def test_no_file_of_the_servers_is_read(serving: process.ServingProcess, tmp_path: Path) -> None:
    secret = tmp_path / "secret.yaml"
    secret.write_text("password: swordfish")
    for value in (str(secret), "secret.yml", "../secret"):
        assert not ask(scheduler(), f"indexcache_pattern={value}")
        assert "is a file, and a server reads none" in serving.last_rejection
        assert "password" not in serving.last_rejection
    assert ask(scheduler(), "indexcache_pattern=uniform:1/2")
    assert str(serving.pattern) == "FSFS"


def test_a_static_server_says_how_to_get_a_live_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_process", None)
    static = process.activate(replace(PLAN, mode="static"))
    assert not ask(scheduler(), "indexcache_pattern=FSFS")
    assert "--indexcache-mode live" in static.last_rejection


def test_other_settings_are_sglangs() -> None:
    requests = []
    request = SimpleNamespace(server_args={"max_running_requests": 4})
    internal_state._accept(lambda _, request: requests.append(request), None, request)
    assert requests == [request]
