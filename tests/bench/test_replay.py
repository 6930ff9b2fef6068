"""Traffic: its shape, its texts, and what is refused of SGLang's report on it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_indexcache.ask.client import Client
from sglang_indexcache.bench import replay
from sglang_indexcache.bench.environment import environment
from sglang_indexcache.bench.replay import (
    Replay,
    ReplayResult,
    conditions,
    nearest_rank,
    read_turns,
    replay_grid,
    write_replay,
)
from sglang_indexcache.bench.results import Configuration, Model, ServerFacts, load
from sglang_indexcache.bench.traffic import P50, P90, Mix, Session, Words, sessions, trace
from sglang_indexcache.errors import BenchError
from sglang_indexcache.support.text import make_tokenizer

MIX = Mix(sessions=2, limit=1000, system=100, answer=4)
SESSIONS = [Session((200, 50)), Session((300,))]


def raw(**changes: Any) -> dict[str, Any]:
    """What ``sglang.benchmark.serving`` writes for :data:`SESSIONS`."""
    good: dict[str, Any] = {
        "duration": 3.0,
        "errors": ["", "", ""],
        "ttfts": [0.5, 0.1, 0.7],
        "itls": [[0.01] * 3, [0.02] * 3, [0.03] * 3],
        "input_lens": [310, 370, 405],
        "output_lens": [4, 4, 4],
        "cached_tokens": [0, 300, 64],
    }
    return {**good, **changes}


def test_turns_are_read() -> None:
    turns = read_turns(raw(), SESSIONS, MIX)
    assert [(t.session, t.turn, t.prompt, t.cached) for t in turns] == [
        (0, 0, 310, 0), (0, 1, 370, 300), (1, 0, 405, 64),
    ]  # fmt: skip
    assert [t.tpot for t in turns] == pytest.approx([0.01, 0.02, 0.03])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"errors": ["", "Traceback\nClientError: gone", ""]}, "1 of 3 turns failed.*gone"),
        ({"ttfts": [0.5]}, "1 of 3 turns were answered"),
        ({"input_lens": [310, 340, 405]}, "session 0, turn 1.*read 340 of at least 350"),
        ({"output_lens": [4, 4, 3]}, "session 1, turn 0: 3 of 4 tokens"),
        ({"cached_tokens": [64, 0, 64]}, "no later turn hit the prefix cache"),
    ],
)
def test_a_bad_replay_gives_no_result(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BenchError, match=message):
        read_turns(raw(**changes), SESSIONS, MIX)


@given(
    st.integers(1, 60), st.floats(1, 6), st.integers(800, 300_000), st.integers(0, 300),
    st.integers(0, 1000),
)  # fmt: skip
def test_sessions_fit_the_limit(
    count: int, turns: float, limit: int, system: int, seed: int
) -> None:
    mix = Mix(sessions=count, turns=turns, limit=limit, system=system, seed=seed)
    made = sessions(mix)
    assert len(made) == count
    assert made == sessions(mix)
    for session in made:
        assert session.turns
        assert min(session.turns) >= 32
        assert session.total(mix) <= max(limit, system + 32 + mix.answer + 16)


def test_sglangs_benchmark_gets_the_key_and_leaves_none_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes the whole of ``/server_info`` beside its figures, and that has the server's key."""
    key = "the-key"
    seen: dict[str, Any] = {}

    def benchmark(command: list[str], **how: Any) -> SimpleNamespace:
        seen.update(command=command, key=how["env"].get("OPENAI_API_KEY"))
        output = Path(command[command.index("--output-file") + 1])
        output.write_text(json.dumps(raw(server_info={"api_key": key})) + "\n")
        return SimpleNamespace(returncode=0)

    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr(replay.subprocess, "run", benchmark)
    client = Client("http://127.0.0.1:9", api_key=key)
    found = replay._drive(client, tmp_path, tmp_path / "trace", MIX, tmp_path, "FSFS")
    assert found["duration"] == 3.0
    body = json.loads(seen["command"][seen["command"].index("--extra-request-body") + 1])
    assert body == {"custom_params": {"indexcache_pattern": "FSFS"}}
    assert seen["key"] == key
    assert key not in seen["command"]
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and key in path.read_text()]
    assert not Path(seen["command"][seen["command"].index("--output-file") + 1]).exists()


def test_lengths_have_the_stated_percentiles() -> None:
    mix = Mix(sessions=4000, limit=P90, system=1000)
    totals = sorted(session.total(mix) for session in sessions(mix))
    assert totals[2000] == pytest.approx(P50, rel=0.1)
    assert totals[3500] < P90
    assert totals[3700] == pytest.approx(P90, rel=0.01)
    counts = [len(session.turns) for session in sessions(mix)]
    assert sum(counts) / len(counts) == pytest.approx(mix.turns, rel=0.1)


@pytest.mark.parametrize(
    ("mix", "message"),
    [
        (Mix(sessions=0, limit=9999), "at least 1"),
        (Mix(sessions=1, limit=100), "no room for two turns"),
        (Mix(sessions=1, limit=9999, answer=1), "answers of 2"),
    ],
)
def test_mixes_without_traffic(mix: Mix, message: str) -> None:
    with pytest.raises(BenchError, match=message):
        mix.check()


def test_texts_have_the_wanted_tokens(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    make_tokenizer(1024).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    words = Words(tokenizer)
    for length in (1, 77, 1500):
        text = words.text(length, random.Random(length))
        assert len(tokenizer(text)["input_ids"]) == length
    made = trace(MIX, SESSIONS, words, "a")
    first, second = made["conversations"][0]
    assert [message["role"] for message in first["messages"]] == ["system", "user"]
    assert [message["role"] for message in second["messages"]] == ["user"]
    assert first["messages"][0] == made["conversations"][1][0]["messages"][0]
    other = trace(MIX, SESSIONS, words, "b")
    assert json.dumps(made) != json.dumps(other)
    assert made == trace(MIX, SESSIONS, words, "a")


def test_a_tokenizer_that_joins_words() -> None:
    class Joining:
        vocab_size = 3

        def decode(self, ids: list[int]) -> str:
            return [" ab", " cd", "x"][ids[0]]

        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            return {"input_ids": [0]}

    with pytest.raises(BenchError, match="does not keep words apart"):
        Words(Joining())


def replayed(device: str = "cpu") -> ReplayResult:
    """Two rounds, the second on a machine half as fast; 1/2 is twice as fast and 1.6 times."""
    facts = ServerFacts(
        device=device, tp=1, dp=1, dp_attention=False, chunked_prefill=1, page=1, capacity=1,
        index_k_bytes=1,
    )  # fmt: skip

    def replay(name: str, number: int, scale: float) -> Replay:
        turns = read_turns(raw(ttfts=[0.5 * scale, 0.1 * scale, 0.7 * scale]), SESSIONS, MIX)
        return Replay(
            configuration=name, round=number, facts=facts, busy_cores=0.3, seconds=1.0, turns=turns
        )

    return ReplayResult(
        environment=environment(),
        started_here=True,
        model=Model(name="m", architecture="a", digest="", shape={}, note="Made up."),
        arguments=("--tp", "8"),
        configurations=(
            Configuration(name="full", value="full", pattern="FF"),
            Configuration(name="1/2", value="1/2", pattern="FS"),
        ),
        mix=MIX,
        replays=(
            replay("full", 0, 1),
            replay("1/2", 0, 0.5),
            replay("full", 1, 2),
            replay("1/2", 1, 1.25),
        ),
    )


def test_percentiles_and_ratios() -> None:
    result = replayed()
    first = result.replays[0]
    assert [first.percentile("ttft", p) for p in (1, 50, 90)] == [0.1, 0.5, 0.7]
    assert first.hit_rate == pytest.approx(364 / 1085)
    assert result.speedups("1/2", "ttft", 50) == pytest.approx([2.0, 1.6])


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=250), st.integers(1, 100))
def test_nearest_rank(values: list[float], percent: int) -> None:
    found = nearest_rank(values, percent)
    assert 100 * sum(value <= found for value in values) >= percent * len(values)
    below = [value for value in values if value < found]
    assert 100 * len(below) < percent * len(values)


def test_few_turns_have_no_high_percentiles() -> None:
    """With three turns P90 and P99 would both be the slowest."""
    result = replayed()
    assert result.percentiles == (50,)

    def longer(turns: int) -> ReplayResult:
        one = result.replays[0]
        many = one.model_copy(update={"turns": (one.turns * turns)[:turns]})
        return result.model_copy(update={"replays": (many,)})

    assert [longer(n).percentiles for n in (9, 10, 99, 100)] == [
        (50,), (50, 90), (50, 90), (50, 90, 99),
    ]  # fmt: skip


def test_a_cpus_absolute_times_are_not_shown() -> None:
    grid = replay_grid(replayed())
    assert grid.header == ("", "TTFT P50", "TPOT P50", "prompt tokens cached")
    assert grid.rows[0] == ("full", "1", "1", "34%")
    assert grid.rows[1] == ("1/2", "1.80x (1.60-2.00)", "1.00x (1.00-1.00)", "34%")


def test_a_gpus_are_beside_its_speedups() -> None:
    grid = replay_grid(replayed("cuda"))
    assert grid.rows[0][1:3] == ("750 ms", "20 ms")
    assert grid.rows[1][1] == "438 ms, 1.80x (1.60-2.00)"


def test_files_are_written_with_their_conditions(tmp_path: Path) -> None:
    result = replayed()
    written = write_replay(result, tmp_path)
    assert [path.name for path in written] == [
        "replay.json", "replay.md", "replay.png",
    ]  # fmt: skip
    assert load(ReplayResult, written[0]) == result
    text = conditions(result)
    assert text in written[1].read_text()
    assert "2 rounds of [full 1/2]; a round sends 2 sessions of 3 turns in all" in text
    assert "P50 370, P90 405, most 405; of a session's last turn: P50 370, P90 405" in text
    for said in ("`--tp 8`", "Made up.", "at most 0.3 of", "wall clock"):
        assert said in text
