"""Metrics: sums of what was counted, SGLang's labels, and failures that stay ours."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import prometheus_client
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_indexcache import __version__
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving import http_checks, internal_state, process, requests
from sglang_indexcache.serving.operating import metrics
from sglang_indexcache.serving.operating.metrics import (
    Exporter,
    SchedulerCollector,
    TokenizerCollector,
    collectors,
)
from sglang_indexcache.serving.policy import Policy
from sglang_indexcache.serving.protocol import SWITCH
from sglang_indexcache.serving.traffic import MAX_LABELS
from tests.serving.plans import plan

LABELS = {"model_name": "m", "engine_type": "unified", "tp_rank": 0, "pp_rank": 0}


@pytest.fixture
def serving_state(monkeypatch: pytest.MonkeyPatch) -> process.ServingProcess:
    monkeypatch.setattr(process, "_process", None)
    monkeypatch.setattr(requests, "in_hand", lambda: {"FSSS": 2})
    state = process.activate(plan("FSSS", mode="live"))
    state.traffic.here, state.traffic.own = range(4), frozenset(range(4))
    state.traffic.topk, state.traffic.flops, state.traffic.index_k_bytes = 8, 100, 528
    return state


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> prometheus_client.CollectorRegistry:
    """Return a registry in place of the process' own."""
    fresh = prometheus_client.CollectorRegistry()
    for name in ("Counter", "Gauge"):
        kind = getattr(prometheus_client, name)
        monkeypatch.setattr(
            prometheus_client, name, lambda *a, kind=kind, **k: kind(*a, registry=fresh, **k)
        )
    return fresh


@pytest.fixture
def sample(registry: prometheus_client.CollectorRegistry) -> Callable[..., float | None]:
    """Return the value of one of our metrics, of the process with :data:`LABELS`."""

    def value(name: str, **labels: str) -> float | None:
        all_labels = {k: str(v) for k, v in LABELS.items()} | labels
        return registry.get_sample_value(f"sglang_indexcache_{name}", all_labels)

    return value


def work(serving_state: process.ServingProcess) -> None:
    """Count a prefill of two patterns, and a decode."""
    requests = [(Pattern("FSSS"), 10, 10), (Pattern("FFSS"), 4, 20)]
    serving_state.count_forward("prefill", requests)
    for layer in range(4):
        serving_state.count_layer(layer, is_full=layer < 2)
    serving_state.count_forward("decode", [(Pattern("FSSS"), 1, 11)])
    serving_state.count_forward("decode", [], idle=True)


def test_sums_are_what_was_counted(
    serving_state: process.ServingProcess, sample: Callable[..., float | None]
) -> None:
    exporter = Exporter(LABELS)

    pairs = 55 + 4 * 16 + 10  # rows and the tokens that they see
    for times in (1, 2):  # nothing twice, nothing lost
        work(serving_state)
        for _ in range(2):
            exporter.export(serving_state)
        assert sample("tokens_total", phase="prefill", pattern="FSSS") == 10 * times
        assert sample("tokens_total", phase="prefill", pattern="FFSS") == 4 * times
        assert sample("tokens_total", phase="decode", pattern="FSSS") == times
        in_prefill = {"phase": "prefill", "length": "2Ki"}
        assert sample("pairs_total", kind="scored", **in_prefill) == 2 * pairs * times
        assert sample("pairs_total", kind="skipped", **in_prefill) == 2 * pairs * times
        assert sample("flops_saved_total") == 100 * (2 * pairs + 3 * 11) * times
        assert sample("forwards_total", mixed="1") == times
        assert sample("forwards_total", mixed="0") == times
        assert sample("idle_forwards_total") == times
        assert sample("layer_runs_total", layer="1", did="ran") == times
        assert sample("layer_runs_total", layer="3", did="reused") == times
    assert sample("index_k_bytes") == 528
    assert sample("requests", pattern="FSSS") == 2


def test_a_switch_moves_what_is_in_effect(
    serving_state: process.ServingProcess,
    registry: prometheus_client.CollectorRegistry,
    sample: Callable[..., float | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exporter = Exporter(LABELS)
    exporter.export(serving_state)
    for by in ("request", "switch"):  # else the first would be no increase
        assert sample("rejections_total", by=by) == 0
    serving_state.replace(Policy.of(Pattern("FFFF")), "a test")
    serving_state.traffic.rejections["switch"] += 1
    monkeypatch.setattr(requests, "in_hand", lambda: {"FFFF": 1})
    exporter.export(serving_state)
    samples = [s for metric in registry.collect() for s in metric.samples]
    info = {s.labels["pattern"]: s.value for s in samples if s.name.endswith("_info")}
    assert info == {"FSSS": 0, "FFFF": 1}
    waiting = {s.labels["pattern"]: s.value for s in samples if s.name.endswith("_requests")}
    assert waiting == {"FSSS": 0, "FFFF": 1}
    assert sample("switches_total") == sample("rejections_total", by="switch") == 1


def test_no_more_series_than_so_many(
    serving_state: process.ServingProcess,
    registry: prometheus_client.CollectorRegistry,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exporter = Exporter(LABELS)
    for number in range(MAX_LABELS + 3):
        monkeypatch.setattr(requests, "in_hand", lambda n=number: {f"a{n}": 1, f"b{n}": 1})
        exporter.export(serving_state)
    counts = {s.labels["pattern"]: s.value for m in registry.collect() for s in m.samples
             if s.name.endswith("_requests")}  # fmt: skip
    assert len(counts) == MAX_LABELS + 1
    assert counts["others"] == 2


def test_a_metric_that_throws_stops_alone(
    serving_state: process.ServingProcess,
    sample: Callable[..., float | None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Prometheus' client refuses a counter that falls; SGLang's metrics and our others go on."""
    logged: list[Any] = []
    base = SchedulerCollector.__mro__[1]
    monkeypatch.setattr(base, "__init__", lambda self, labels: None)
    monkeypatch.setattr(base, "log_stats", lambda self, stats: logged.append(stats))
    collector = SchedulerCollector(LABELS)  # type: ignore[arg-type]
    work(serving_state)
    collector.log_stats(0)
    forwards = sample("forwards_total", mixed="0")
    serving_state.counters.forwards = 0
    monkeypatch.setattr(requests, "in_hand", lambda: 1 / 0)
    for number in (1, 2):
        work(serving_state)
        collector.log_stats(number)
        assert sample("tokens_total", phase="decode", pattern="FSSS") == number + 1
        assert sample("layer_runs_total", layer="1", did="ran") == number + 1
        assert sample("index_k_bytes") == 528
    assert logged == [0, 1, 2]
    for name in ("forwards", "requests"):
        assert caplog.text.count(f"the metric sglang_indexcache_{name} stops here") == 1
    assert caplog.text.count("stops here") == 2
    assert sample("forwards_total", mixed="0") == forwards


PHASES = st.sampled_from(["prefill", "decode"])
PATTERNS = st.text("FS", min_size=3, max_size=3).map(lambda text: Pattern(f"F{text}"))
SERVED = st.builds(
    lambda pattern, rows, before: (pattern, rows, rows + before),
    PATTERNS,
    st.integers(1, 40),
    st.integers(0, 200_000),
)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("forward"), PHASES, st.lists(SERVED, max_size=4), st.booleans()),
        st.tuples(st.just("layer"), st.integers(0, 3), st.booleans()),
        st.tuples(st.just("switch"), PATTERNS),
        st.tuples(st.just("refuse"), st.sampled_from(["switch", "request"])),
        st.tuples(st.just("capture"), st.booleans()),
    ),
    max_size=30,
)


@settings(deadline=None, max_examples=60)
@given(events=EVENTS)
def test_no_counter_falls_under_any_traffic(events: list[tuple[Any, ...]]) -> None:
    """A counter that falls is refused by Prometheus' client, and its series stands still."""
    with pytest.MonkeyPatch.context() as patched:
        fresh = prometheus_client.CollectorRegistry()
        for name in ("Counter", "Gauge"):
            kind = getattr(prometheus_client, name)
            patched.setattr(prometheus_client, name, partial(kind, registry=fresh))
        exporter = Exporter(LABELS)
    server = process.ServingProcess(plan("FSSS", mode="live"))
    server.traffic.here, server.traffic.own = range(4), frozenset(range(4))
    server.traffic.topk, server.traffic.flops = 8, 100
    before: dict[Any, float] = {}
    for event in events:
        match event:
            case ("forward", phase, served, is_idle):
                server.count_forward(phase, [] if is_idle else served, idle=is_idle)
            case ("layer", layer, is_full):
                server.count_layer(layer, is_full=is_full)
            case ("switch", pattern):
                server.replace(Policy.of(pattern), "a test")
            case ("refuse", who):
                server.traffic.rejections[who] += 1
            case ("capture", is_counting):
                server.is_counting = is_counting
        exporter.export(server)
        now = {
            (sample.name, *sorted(sample.labels.items())): sample.value
            for metric in fresh.collect()
            for sample in metric.samples
            if sample.name.endswith("_total")
        }
        assert all(now[key] >= value for key, value in before.items())
        before = now
    assert exporter._told.keys() == metrics.COUNTERS.keys() | metrics.GAUGES.keys()


def test_a_switch_shows_without_traffic(
    serving_state: process.ServingProcess,
    sample: Callable[..., float | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A roll-back at night, on a server without requests, must not look undone."""
    monkeypatch.setattr(internal_state, "on_switch", [])
    monkeypatch.setattr(SchedulerCollector.__mro__[1], "__init__", lambda self, labels: None)
    SchedulerCollector(LABELS)  # type: ignore[arg-type]
    bag = SimpleNamespace(disaggregation_mode="null", pp_size=1)
    for name in ("get_disagg", "get_parallel"):
        monkeypatch.setattr(f"sglang.srt.runtime_context.{name}", lambda: bag)
    controller = SimpleNamespace(scheduler=None)
    for pattern in ("FFFF", "FFF"):  # the second does not fit
        request = SimpleNamespace(server_args={f"{SWITCH}{pattern}": 1})
        internal_state._accept(lambda *_: None, controller, request)
    about = {"mode": "live", "source": serving_state.source, "version": __version__}
    assert sample("info", pattern="FFFF", **about) == 1
    assert sample("switches_total") == 1
    assert sample("rejections_total", by="switch") == 1


def test_a_collector_of_whoever_starts_the_server_stays() -> None:
    ours = {"scheduler": SchedulerCollector, "tokenizer": TokenizerCollector}
    assert collectors(None) == ours
    assert collectors({"storage": int}) == ours | {"storage": int}
    assert collectors({"scheduler": int}) == ours | {"scheduler": int}


def test_refused_requests_are_counted_where_they_come_in(
    registry: prometheus_client.CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_checks, "on_refusal", [])
    monkeypatch.setattr(TokenizerCollector.__mro__[1], "__init__", lambda self, labels: None)
    TokenizerCollector({"model_name": "m"})
    for count in range(3):  # from 0: a series that begins at 1 shows no increase
        name = "sglang_indexcache_refused_total"
        assert registry.get_sample_value(name, {"model_name": "m"}) == count
        asyncio.run(http_checks._refuse(AsyncMock(), "misspelt"))


# -- the dashboard and the rules ---------------------------------------------------------------

RULES = Path(__file__).parents[3] / "docker" / "monitoring" / "rules.yaml"


def queries() -> list[str]:
    dashboard = json.loads(
        (RULES.parent / "grafana/dashboards/json/indexcache-dashboard.json").read_text()
    )
    panels = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    rules = yaml.safe_load(RULES.read_text())
    return panels + [rule["expr"] for group in rules["groups"] for rule in group["rules"]]


def test_every_query_asks_for_metrics_and_labels_that_there_are() -> None:
    kinds = {f"{name}_total": metric.labels for name, metric in metrics.COUNTERS.items()}
    kinds |= {name: metric.labels for name, metric in metrics.GAUGES.items()}
    kinds["refused_total"] = ()
    queried = set()
    for query in queries():
        names = re.findall(r"sglang_indexcache_(\w+)", query)
        assert names, query
        queried |= set(names)
        allowed = {label for name in names for label in kinds[name]} | set(LABELS) | {"instance"}
        within = re.findall(r"(\w+)=~?\"", query)
        grouped = [
            label.strip() for by in re.findall(r"by \(([^)]*)\)", query) for label in by.split(",")
        ]
        assert set(within) | set(grouped) <= allowed, query
    assert queried == set(kinds)
