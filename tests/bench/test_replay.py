"""Traffic: its shape, its texts, and what is refused of SGLang's report on it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_indexcache.bench.environment import environment
from sglang_indexcache.bench.errors import BenchError
from sglang_indexcache.bench.replay import Replay, ReplayResult, read_turns, replay_grid
from sglang_indexcache.bench.results import Configuration, Model, ServerFacts
from sglang_indexcache.bench.traffic import P50, P90, Mix, Session, Words, sessions, trace
from sglang_indexcache.demo_model import make_tokenizer

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

    make_tokenizer(1024, tmp_path)
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


def test_percentiles_and_ratios() -> None:
    facts = ServerFacts(
        device="cpu", tp=1, dp=1, dp_attention=False, chunked_prefill=1, page=1, capacity=1,
        index_k_bytes=1,
    )  # fmt: skip

    def replay(name: str, number: int, scale: float) -> Replay:
        turns = read_turns(raw(ttfts=[0.5 * scale, 0.1 * scale, 0.7 * scale]), SESSIONS, MIX)
        return Replay(
            configuration=name, round=number, facts=facts, busy_cores=0.0, seconds=1.0, turns=turns
        )

    result = ReplayResult(
        environment=environment(),
        model=Model(name="m", architecture="a", digest="", shape={}),
        arguments=(),
        configurations=(
            Configuration(name="full", value="full", pattern="FF"),
            Configuration(name="1/2", value="1/2", pattern="FS"),
        ),
        mix=MIX,
        replays=(
            replay("full", 0, 1),
            replay("1/2", 0, 0.5),
            replay("full", 1, 2),
            replay("1/2", 1, 1),
        ),
    )
    first = result.replays[0]
    assert [first.percentile("ttft", p) for p in (1, 50, 90)] == [0.1, 0.5, 0.7]
    assert first.hit_rate == pytest.approx(364 / 1085)
    assert result.speedup("1/2", "ttft", 50) == pytest.approx(2.0)
    grid = replay_grid(result)
    assert "s" not in "".join(grid.rows[1][1:])  # a CPU's absolute times are not shown
    assert grid.rows[1][1] == "2.00x"
