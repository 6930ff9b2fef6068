"""Tables and figures from made-up samples."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sglang_indexcache.errors import BenchError
from sglang_indexcache.lab.latency import tables
from sglang_indexcache.lab.latency.measure import write_latency
from sglang_indexcache.lab.latency.results import (
    Configuration,
    Environment,
    LatencyResult,
    LatencySample,
    Metric,
    Model,
    ServerFacts,
    Visit,
)
from sglang_indexcache.lab.runs.provenance import machine
from sglang_indexcache.library.sizes import checkpoint_of

LENGTHS = (10_000, 200_000)
BASE: dict[Metric, dict[int, float]] = {
    "prefill": {10_000: 1.0, 200_000: 40.0},
    "decode": {10_000: 80.0, 200_000: 50.0},
    "full": {10_000: 2000.0, 200_000: 200.0},
}


def result(device: str = "cpu", share: float | None = 0.5) -> LatencyResult:
    """Three rounds in which the second configuration is 1.5, 1.6 and 1.4 times as fast."""
    configured = (
        Configuration(name="full", value="full", pattern="F" * 48),
        Configuration(name="quarter", value="uniform:1/4", pattern="FSSS" * 12),
    )
    facts = ServerFacts(
        device=device, tp=1, dp=1, dp_attention=False, chunked_prefill=8192, page=64,
        capacity=800_000, index_k_bytes=528,
    )  # fmt: skip
    samples, visits = [], []
    for number, gain in enumerate((1.5, 1.6, 1.4)):
        for configuration in configured:
            visits.append(
                Visit(configuration=configuration.name, round=number, facts=facts, busy_cores=0.1)
            )
            for metric, values in BASE.items():
                for length, value in values.items():
                    factor = gain if configuration.name == "quarter" else 1.0
                    value = value / factor if metric == "prefill" else value * factor
                    samples.append(
                        LatencySample(
                            configuration=configuration.name, round=number, length=length,
                            metric=metric, value=value, requests=1, indexer_share=share,
                        )
                    )  # fmt: skip
    shape = dict(checkpoint_of("30b").shape)
    return LatencyResult(
        environment=Environment(**machine()),
        side_by_side=False,
        model=Model(name="m", architecture="a", digest="", shape=shape),
        arguments=("--tp", "8"),
        configurations=configured,
        lengths=LENGTHS,
        new_tokens=64,
        clock="wall",
        rounds=3,
        visits=tuple(visits),
        samples=tuple(samples),
    )


@pytest.mark.parametrize("metric", ["prefill", "decode", "full"])
def test_a_speedup_is_the_ratio_of_neighbours(metric: Metric) -> None:
    speed = result().speedup("quarter", metric, 200_000)
    assert (speed.median, speed.low, speed.high) == pytest.approx((1.5, 1.4, 1.6))
    # Three of four indexers gone, which took half of the time.
    assert speed.ideal == pytest.approx(1 / (1 - 0.5 * 0.75))


def test_drift_between_rounds_cancels() -> None:
    plain = result()
    slower = [
        s.model_copy(update={"value": s.value * (1 + s.round)})
        if s.metric == "prefill"
        else s.model_copy(update={"value": s.value / (1 + s.round)})
        for s in plain.samples
    ]
    drifting = plain.model_copy(update={"samples": tuple(slower)})
    for metric in plain.metrics:
        assert drifting.speedup("quarter", metric, 10_000).median == pytest.approx(
            plain.speedup("quarter", metric, 10_000).median
        )


def test_a_cpus_absolute_times_are_not_shown() -> None:
    text = tables.latency_grid(result()).to_markdown()
    assert "1.50x (1.40-1.60), 94% of the ideal" in text
    alone = tables.latency_grid(result(share=None)).to_markdown()
    assert "1.50x (1.40-1.60) |" in alone
    assert not re.search(r"\| [\d.]+ \(", text)  # a time or a rate before its ratio
    assert "(s)" not in text


def test_a_gpus_are_as_in_the_paper() -> None:
    text = tables.latency_grid(result("cuda")).to_markdown()
    assert "*Prefill time (s)*" in text
    assert "| DSA | 1 | 40 |" in text
    assert "26.7 (1.50x, 1.40-1.60)" in text
    assert "| DSA | 2000 | 200 |" in text


def test_a_clients_machine_is_not_its_servers() -> None:
    remote = result("cuda").model_copy(update={"started_here": False})
    assert "GPUs that the client did not see" in tables.latency_grid(remote).title
    assert "the servers ran already" in tables.conditions(remote)
    assert "the servers ran already" not in tables.conditions(result("cuda"))


def test_conditions_say_who_took_turns() -> None:
    alone = result()
    assert "one server at a time" in tables.conditions(alone)
    turns = alone.model_copy(update={"side_by_side": True, "visits": alone.visits * 3})
    assert "in turns, request by request" in tables.conditions(turns)
    before = alone.model_copy(update={"side_by_side": True, "visits": alone.visits * 2})
    assert "servers side by side, in turns at every length" in tables.conditions(before)


def test_conditions_say_how_full_the_cache_was_and_which_mode() -> None:
    plain = result()
    assert "1 of 10K (1%), 1 of 200K (25%)" in tables.conditions(plain)
    assert "live mode" not in tables.conditions(plain)
    live = [
        v.model_copy(update={"facts": v.facts.model_copy(update={"mode": "live"})})
        for v in plain.visits
    ]
    text = tables.conditions(plain.model_copy(update={"visits": tuple(live)}))
    assert "S layers go on writing index keys" in text


def test_a_missing_round_is_an_error() -> None:
    complete = result()
    short = complete.model_copy(update={"samples": complete.samples[:-1]})
    with pytest.raises(BenchError, match="full at 200000 tokens in every round"):
        short.speedup("quarter", "full", 200_000)


def test_files_are_written(tmp_path: Path) -> None:
    files = write_latency(result(), tmp_path)
    assert {path.name for path in files} == {
        "latency.json", "latency.md", "latency-speedup.png",
    }  # fmt: skip
    assert all(path.stat().st_size > 500 for path in files)
