"""The latency benchmark against servers that behave, and against each way not to."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from sglang_indexcache.checkpoint import Checkpoint
from sglang_indexcache.errors import BenchError, CheckpointError, PatternError, ServerError
from sglang_indexcache.lab.client.http import Client
from sglang_indexcache.lab.client.stream import StreamedAnswer, stream
from sglang_indexcache.lab.latency import measure as latency
from sglang_indexcache.lab.latency import servers
from sglang_indexcache.lab.latency.measure import (
    Settings,
    TargetModel,
    random_prompts,
    read_target,
    run,
    steady_rate,
)
from sglang_indexcache.lab.latency.results import LatencyResult, Model, configurations
from sglang_indexcache.lab.latency.servers import RunningServers, StartedServers
from sglang_indexcache.pattern import Pattern
from tests.fakes.server import Clock, FakeServer, serving

CONFIG = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "num_hidden_layers": 8,
    "hidden_size": 64,
    "index_topk": 64,
    "vocab_size": 500,
}
CHECKPOINT = Checkpoint.from_config(CONFIG)
MODEL = Model(name="m", architecture="GlmMoeDsaForCausalLM", digest="", shape={})
TARGET = TargetModel(CHECKPOINT, MODEL, 500)
HALF = str(Pattern.uniform(8, 2))
QUICK = Settings(lengths=(64, 256), rounds=2, new_tokens=8, watch_seconds=0.0)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Client and servers have one clock, in which this machine's own time does not count."""
    clock = Clock()
    monkeypatch.setattr(FakeServer, "clock", clock)
    monkeypatch.setattr(latency, "stream", partial(stream, clock=clock))


def measure(
    fakes: dict[str, FakeServer],
    settings: Settings = QUICK,
    output: Path | None = None,
    **more: Any,
) -> LatencyResult:
    configured = configurations(("full", "1/2=uniform:1/2"), CHECKPOINT)
    with ExitStack() as stack:
        output = output or Path(stack.enter_context(TemporaryDirectory()))
        clients = {name: Client(stack.enter_context(serving(fake))) for name, fake in fakes.items()}
        return run(TARGET, RunningServers(clients), configured, settings, output, **more)


def good(**changes: object) -> dict[str, FakeServer]:
    """Return two servers; ``changes`` befall the second."""
    second: dict[str, Any] = {"pattern": HALF, **changes}
    return {"full": FakeServer("F" * 8), "1/2": FakeServer(**second)}


def test_a_good_run() -> None:
    result = measure(good())
    assert {(s.metric, s.length) for s in result.samples} == {
        (metric, length) for metric in ("prefill", "decode", "full") for length in (64, 256)
    }
    for metric in result.metrics:
        speed = result.speedup("1/2", metric, 256)
        assert 0 < speed.low <= speed.median <= speed.high
        assert result.speedup("full", metric, 256).median == 1.0
        assert result.indexer_share(metric, 256) is None  # the server does not tell


def test_an_interrupted_run_goes_on_behind_its_last_whole_round(tmp_path: Path) -> None:
    settings = replace(QUICK, rounds=3)

    def again(fakes: dict[str, FakeServer], stop: str = "") -> tuple[LatencyResult, list[str]]:
        reports: list[str] = []

        def report(line: str) -> None:
            reports.append(line)
            if stop and line.startswith(stop):
                raise KeyboardInterrupt

        return measure(fakes, settings, report=report, output=tmp_path), reports

    with pytest.raises(KeyboardInterrupt):
        again(good(), "round 2 of 3: 1/2")
    with (tmp_path / latency.ROUNDS).open("a") as journal:
        journal.write('{"environment": {"da')
    result, reports = again(good())
    assert reports[0].startswith("resuming: 1 round in ")
    assert reports[1] == "round 2 of 3: full"
    counts = Counter((s.configuration, s.round, s.length, s.metric) for s in result.samples)
    assert set(counts.values()) == {1}
    assert {s.round for s in result.samples} == {v.round for v in result.visits} == {0, 1, 2}
    fakes = good()
    assert again(fakes) == (result, [f"resuming: 3 rounds in {tmp_path}"])
    assert not any(fake.calls for fake in fakes.values())
    with pytest.raises(BenchError, match=r"another benchmark; different: rounds \(3 then, 2 now\)"):
        measure(good(), QUICK, output=tmp_path)


def test_indexers_that_seem_to_outlast_their_answer_have_no_share() -> None:
    """The server and we have a clock each, and tokens that come late shorten what we see."""
    assert latency._share(0.5, 2.0) == 0.25
    assert latency._share(2.5, 2.0) is None
    assert latency._share(None, 2.0) is None


def test_the_servers_own_indexer_time_gives_the_share() -> None:
    result = measure({name: replace(b, indexer_share=0.5) for name, b in good().items()})
    for metric in result.metrics:
        share = result.indexer_share(metric, 256)
        assert share is not None
        ideal = result.speedup("1/2", metric, 256).ideal
        assert ideal == pytest.approx(1 / (1 - share / 2))
    # The step behind the last token counts as the server's time and not as the client's.
    tokens, engine = QUICK.new_tokens, FakeServer("F")
    value = {"prefill": engine.prefill * 256, "decode": 1 / engine.step}
    expected = {"prefill": 0.5, "decode": 0.5 * tokens / (tokens - 1)}
    for sample in result.samples:
        if sample.length == 256 and sample.metric != "full":
            assert sample.value == pytest.approx(value[sample.metric])
            assert sample.indexer_share == pytest.approx(expected[sample.metric])


def test_configurations_take_turns_and_warm_up_is_left_out() -> None:
    fakes = good()
    result = measure(fakes)
    turns = ["full", "1/2"] * 4  # two lengths, each with one request and with many
    assert [v.configuration for v in result.visits] == turns * 2
    assert [v.round for v in result.visits] == [0] * 8 + [1] * 8
    single = [(s.length, s.configuration) for s in result.samples if s.metric == "prefill"]
    assert single == [(length, name) for length in (64, 256) for name in ("full", "1/2")] * 2
    order = [(s.round, s.length, s.configuration) for s in result.samples if s.metric == "full"]
    assert order == [
        (number, length, name)
        for number in (0, 1)
        for length in (64, 256)
        for name in ("full", "1/2")
    ]
    counts = Counter((s.configuration, s.round, s.length, s.metric) for s in result.samples)
    assert set(counts.values()) == {1}
    # Two lengths, one single and one full request each; the rest was warm-up.
    assert fakes["full"].calls > 2 * 4


def test_the_kv_cache_is_filled() -> None:
    result = measure(good())
    # 4096 slots less 8; 64 + 8 tokens take two pages of 64, 256 + 8 take five.
    at_once = {s.length: s.requests for s in result.samples if s.metric == "full"}
    assert at_once == {64: 4088 // 128, 256: 4088 // 320}


def test_what_is_reported_of_known_arrivals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks send every first token after 2 s, then a token every 0.5 s."""

    def known_stream(
        _: object, prompts: list[list[int]], count: int, pattern: object = None
    ) -> list[StreamedAnswer]:
        for fake in fakes.values():
            fake.count()
        return [StreamedAnswer([(2 + 0.5 * n, n + 1) for n in range(count)]) for _ in prompts]

    fakes = {name: FakeServer(b.pattern, dp=2) for name, b in good().items()}
    monkeypatch.setattr(latency, "stream", known_stream)
    values = {(s.metric, s.length): s.value for s in measure(fakes).samples}
    assert values["prefill", 64] == values["prefill", 256] == pytest.approx(2.0)
    assert values["decode", 64] == values["decode", 256] == pytest.approx(2.0)
    # As in the paper's table, of one rank: 31 and 12 requests of 2 tokens a second.
    assert values["full", 64] == pytest.approx(31 * 2.0)
    assert values["full", 256] == pytest.approx(12 * 2.0)


LIVE = {"mode": "live", "pattern": "F" * 8}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fault": "cache"}, "took 64 of 64 prompt tokens from its cache"),
        ({"fault": "truncation"}, "read 63 tokens of a 64-token prompt"),
        ({"fault": "out of memory"}, "answered 500.*out of memory"),
        ({"fault": "stream error"}, "answered an error.*CUDA out of memory"),
        ({"fault": "abort"}, "refused a request: the input is too long"),
        ({"fault": "no end"}, "ended an answer before it was finished"),
        ({"fault": "early end"}, "generated 3 of 8 tokens"),
        ({"fault": "nan stop"}, "stopped an answer early.*NaN happened"),
        ({"fault": "one lump"}, "all 8 tokens of an answer arrived at once"),
        ({"fault": "death"}, "stopped answering in the middle|ended an answer before"),
        ({"fault": "retraction"}, "the KV cache ran full"),
        (LIVE | {"fault": "deaf to names"}, "for pattern FS.* answered under FFFFFFFF"),
        ({"overrides": {"architecture": "A"}}, "serves a A, but m is a GlmMoeDsaForCausalLM"),
        ({"pattern": "F" * 8}, "serves FFFFFFFF on rank 0, not the FSFSFSFS of 1/2"),
        ({"really": "F" * 8}, "ignores the pattern: asked for"),
        ({"really": "F" + "S" * 7}, "ignores the pattern: asked for"),
        (LIVE | {"really": "F" * 8}, "asked for FSFSFSFS, its layers 1, 3"),
    ],
)
def test_a_server_that_does_wrong_gives_no_result(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((BenchError, ServerError), match=message):
        measure(good(**changes))


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        *((f, "leave --model-path to the benchmark") for f in ("--model-path", "--model-path=x")),
        ("--indexcache-pattern=full", "leave --indexcache-pattern to the benchmark"),
        ("--model=x", "leave --model to the benchmark"),
        *((f, "kept with the results") for f in ("--api-key=k", "--admin-api-key", "--api")),
    ],
)
def test_flags_that_a_server_started_here_may_not_have(
    flag: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(BenchError, match=message):
        StartedServers("m", ["--tp", "2", flag], tmp_path)


def test_a_full_cache_that_never_decodes_all_at_once() -> None:
    first, second = StreamedAnswer([(0.1, 1), (0.5, 5)]), StreamedAnswer([(0.6, 1), (1.0, 5)])
    with pytest.raises(BenchError, match="never decoded all at once"):
        steady_rate([first, second])


def test_a_steady_window_counts_only_what_lies_inside() -> None:
    first = StreamedAnswer([(0.0, 1), (1.0, 2), (3.0, 4)])
    second = StreamedAnswer([(2.0, 1), (3.0, 2), (4.0, 3)])
    assert steady_rate([first, second]) == (pytest.approx((1 + 1) / (3.0 - 2.0)), 2.0)


def test_one_live_server_stands_for_all(tmp_path: Path) -> None:
    """Whatever it serves to others, before and after; requests of both arms alternate."""
    fake = FakeServer("FFFFFSSS", mode="live", indexer_share=0.5)
    configured = configurations(("full", "uniform:1/4"), CHECKPOINT)
    with serving(fake) as url:
        running = RunningServers({c.name: Client(url) for c in configured})
        result = run(TARGET, running, configured, QUICK, tmp_path)
    assert {v.configuration for v in result.visits} == {"full", "uniform:1/4"}
    assert {v.facts.mode for v in result.visits} == {"live"}
    assert not result.started_here
    assert fake.pattern == "FFFFFSSS"
    assert all(sample.indexer_share for sample in result.samples)
    for length in (64, 256):
        runs = [s.configuration for s in result.samples if (s.metric, s.length) == ("full", length)]
        assert runs == ["full", "uniform:1/4"] * 2


def test_one_server_is_up_at_a_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    up: list[str] = []
    up_at: list[tuple[str, ...]] = []

    class OurServer:
        """``serving.Server`` without a process."""

        def __init__(self, command: list[str], _log: Path) -> None:
            self.pattern = command[command.index("--indexcache-pattern") + 1]
            self.client = Client("http://127.0.0.1:9")

        def __enter__(self) -> OurServer:
            up.append(self.pattern)
            return self

        def __exit__(self, *_: object) -> None:
            up.remove(self.pattern)

        def wait_until_ready(self, timeout: float) -> None:
            assert timeout > 600

    monkeypatch.setattr(servers, "Server", OurServer)
    configured = configurations(("full", "1/2=uniform:1/2"), CHECKPOINT)
    starter = StartedServers("m", [], tmp_path)
    for configuration in (*configured, *configured):
        with starter.visit(configuration):
            up_at.append(tuple(up))
    assert up == []
    assert up_at == [("full",), ("uniform:1/2",)] * 2


def test_a_missing_server(tmp_path: Path) -> None:
    configured = configurations(("full",), CHECKPOINT)
    nowhere = RunningServers({"full": Client("http://127.0.0.1:9")})
    with pytest.raises(ServerError, match=r"cannot reach the server at http://127\.0\.0\.1:9"):
        run(TARGET, nowhere, configured, QUICK, tmp_path)


def test_a_prompt_that_does_not_fit() -> None:
    with pytest.raises(BenchError, match="too few for a prompt of 5000"):
        measure(good(), Settings(lengths=(5000,), watch_seconds=0.0))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Settings(lengths=()), "at least one length"),
        (Settings(lengths=(1,), rounds=0), "one round"),
        (Settings(lengths=(1, 2, 1)), "the same length was given twice"),
        (Settings(lengths=(1,), new_tokens=1), "at least 2"),
    ],
)
def test_settings_without_a_result(settings: Settings, message: str) -> None:
    with pytest.raises(BenchError, match=message):
        settings.check()


def test_one_request_that_fills_the_cache_is_measured_once() -> None:
    fakes = {name: FakeServer(b.pattern, capacity=400) for name, b in good().items()}
    result = measure(fakes)
    by_metric = {
        metric: [s.value for s in result.samples if s.metric == metric and s.length == 256]
        for metric in ("decode", "full")
    }
    assert by_metric["decode"] == by_metric["full"]
    assert len(by_metric["full"]) == 4


def test_a_config_without_a_vocabulary_is_refused(tmp_path: Path) -> None:
    config = {name: value for name, value in CONFIG.items() if name != "vocab_size"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"config\.json has no vocab_size"):
        read_target(tmp_path)


def test_names_must_differ() -> None:
    with pytest.raises(PatternError, match="two patterns are called a, so that results"):
        configurations(("a=full", "a=uniform:1/2"), CHECKPOINT)


def test_prompts_are_exact_and_share_no_prefix() -> None:
    prompts = random_prompts(50, 33, 400, 1, "x")
    assert {len(prompt) for prompt in prompts} == {33}
    assert len({prompt[0] for prompt in prompts}) == 50
    assert prompts == random_prompts(50, 33, 400, 1, "x")
    assert prompts != random_prompts(50, 33, 400, 2, "x")
    with pytest.raises(BenchError, match="cannot make 400 different prompts"):
        random_prompts(400, 33, 400)
