"""The demo without SGLang: whose turn it is, what is told, and that nothing is left running."""

from __future__ import annotations

import io
import json
import statistics
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from transformers import AutoTokenizer

from sglang_indexcache.ask.protocol import RankState
from sglang_indexcache.demo import run as demo
from sglang_indexcache.demo import shipped_checkpoint
from sglang_indexcache.demo.run import ROUNDS as LEAST
from sglang_indexcache.demo.run import (
    UNSHOWN,
    Contender,
    DemoFindings,
    DemoQuestion,
    Material,
    times_faster,
)
from sglang_indexcache.errors import ServerError
from tests.fakes import state

QUESTIONS = [DemoQuestion([1, n], f" word{n}") for n in range(8)]


class FakeClient:
    """Answers as SGLang does; ``calls`` is shared, so it shows the order over all servers."""

    def __init__(self, name: str, calls: list[tuple[str, int]], wrong: int = 0, cached: int = 0):
        self.name, self.calls, self.wrong, self.cached = name, calls, wrong, cached

    def generate(self, input_ids: list[list[int]], **_: Any) -> list[dict[str, Any]]:
        words = [f" word{ids[-1]}" for ids in input_ids]
        return [{"text": "?" if n < self.wrong else word} for n, word in enumerate(words)]

    def stream(
        self, input_ids: list[list[int]], sampling_params: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        [prompt] = input_ids
        self.calls.append((self.name, prompt[0]))
        for token in range(1, sampling_params["max_new_tokens"] + 1):
            meta = {
                "prompt_tokens": len(prompt),
                "cached_tokens": self.cached,
                "completion_tokens": token,
                "finish_reason": {"type": "length"},
            }
            yield {"meta_info": meta}

    def states(self) -> list[RankState]:
        return [state("FSSS", index_k_bytes_per_token=132)]


class FakeServer:
    """Started and stopped, in a list that all share."""

    events: list[str]
    failure: BaseException | None = None

    def __init__(self, arguments: list[str], log: Path, env: dict[str, str]) -> None:
        self.command = ["serve", *arguments]
        self.name = arguments[arguments.index("--indexcache-pattern") + 1]
        self.sockets = Path(env["TMPDIR"])

    def start(self) -> None:
        self.events.append(f"start {self.name}")

    def wait_until_ready(self) -> Any:
        if self.failure is not None:
            raise self.failure
        return FakeClient(self.name, [])

    def stop(self, grace: float) -> None:
        assert self.sockets.is_dir()  # removed after the servers, not before
        self.events.append(f"stop {self.name}")


class FakeMaterial:
    def __init__(self, model: Path) -> None:
        pass

    def questions(self, count: int) -> list[DemoQuestion]:
        return QUESTIONS

    def prompts(self, count: int, length: int) -> list[list[int]]:
        return [[n, 0, 0] for n in range(count)]


def screen() -> Console:
    return Console(file=io.StringIO(), width=100)


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return " ".join(console.file.getvalue().split())


def contender(name: str, calls: list[tuple[str, int]], **faults: int) -> Contender:
    return Contender(name, FakeClient(name, calls, **faults))  # type: ignore[arg-type]


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> type[FakeServer]:
    class Servers(FakeServer):
        events: list[str] = []  # noqa: RUF012

    monkeypatch.setattr(demo, "Server", Servers)
    monkeypatch.setattr(demo, "Material", FakeMaterial)
    monkeypatch.setattr(demo, "busy_cores", lambda: 0.0)
    return Servers


def test_servers_take_turns_and_every_prompt_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "busy_cores", lambda: 0.0)
    calls: list[tuple[str, int]] = []
    contenders = [contender("a", calls), contender("b", calls)]
    demo.race(contenders, [[n, 0] for n in range(4)], screen())
    warm_up, turns = calls[:2], calls[2:]
    assert warm_up == [("a", 0), ("b", 0)]
    assert turns == [("a", 1), ("b", 1), ("b", 2), ("a", 2), ("a", 3), ("b", 3)]
    assert (
        [len(runner.prefill) for runner in contenders]
        == [len(runner.per_token) for runner in contenders]
        == [3, 3]
    )


def test_a_cached_prompt_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "busy_cores", lambda: 0.0)
    with pytest.raises(ServerError, match="from its cache"):
        demo.race([contender("a", [], cached=2)], [[0, 0, 0], [1, 0, 0]], screen())


def test_the_whole_demo(tmp_path: Path, fakes: type[FakeServer]) -> None:
    console = screen()
    demo.run(tmp_path / "new" / "folder", console)
    assert fakes.events[:2] == ["start full", "start 1/4"]
    assert sorted(fakes.events[2:]) == ["stop 1/4", "stop full"]
    record = json.loads((tmp_path / "new" / "folder" / "demo.json").read_text())
    assert [len(server["prefill"]) for server in record["servers"]] == [demo.ROUNDS] * 2
    assert [server["name"] for server in record["servers"]] == list(demo.PATTERNS)
    assert record["environment"]["versions"]["python"]
    assert [server["said"] for server in record["servers"]] == [[q.answer for q in QUESTIONS]] * 2
    for words in ("3 to 5 minutes", "round 6 of 6", "same answer to 8 of 8", "demo.json"):
        assert words in text_of(console)


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), ServerError("it ended")])
def test_both_servers_are_stopped_whatever_happens(
    tmp_path: Path, fakes: type[FakeServer], failure: BaseException
) -> None:
    fakes.failure = failure
    with pytest.raises(type(failure)):
        demo.run(tmp_path, screen())
    assert fakes.events[:2] == ["start full", "start 1/4"]
    assert sorted(fakes.events[2:]) == ["stop 1/4", "stop full"]


def findings(wrong: int, ratios: tuple[float, ...]) -> DemoFindings:
    base, shared = contender("all F", []), contender("1/4", [], wrong=wrong)
    demo.ask([base, shared], QUESTIONS, screen())
    for runner in (base, shared):
        runner.state = runner.client.states()[0]
    base.prefill, shared.prefill = list(ratios), [1.0] * len(ratios)
    base.per_token = shared.per_token = [0.05] * len(ratios)
    return DemoFindings(base, shared, QUESTIONS, 4096, [0.1] * len(ratios))


def words(of: DemoFindings) -> str:
    console = screen()
    of.tell(console)
    return text_of(console)


def test_answers_are_counted() -> None:
    sentences = words(findings(3, (2.0,) * 6))
    assert "the same answer to 5 of 8 questions" in sentences
    assert "all F was right 8 times, 1/4 5 times" in sentences


def test_times_are_told_as_the_rule_allows() -> None:
    steady = words(findings(0, (2.0, 2.1, 2.2, 2.0, 2.1, 2.2)))
    assert "prefill 2.10x (2.00x to 2.20x), decode no difference shown" in steady
    wild = words(findings(0, (2.0, 2.1, 9.0, 2.0, 2.1, 2.2)))
    assert "prefill 2.10x (2.00x to 9.00x)" in wild


def test_a_busy_machine_is_told() -> None:
    quiet = findings(0, (2.0,) * 6)
    assert "Other programs" not in words(quiet)
    quiet.busy[3] = 1.7
    assert "Other programs kept up to 1.7 of" in words(quiet)


def test_questions_can_be_answered_from_their_prompt() -> None:
    material = Material(shipped_checkpoint())
    tokenizer = AutoTokenizer.from_pretrained(shipped_checkpoint())
    questions = material.questions(6)
    assert questions == material.questions(6)
    assert len({tuple(question.prompt) for question in questions}) == 6
    for question in questions:
        text = tokenizer.decode(question.prompt)
        ending = text.rpartition("\n? ")[2]
        assert ending.endswith(" is")
        assert text.count(f"\n# {ending}{question.answer}\n") == 1
        assert len(tokenizer(question.answer, add_special_tokens=False)["input_ids"]) == 1
        assert len(question.prompt) == demo.QUESTION_TOKENS
    prompts = material.prompts(7, 512)
    assert [len(prompt) for prompt in prompts] == [512] * 7
    assert len({tuple(prompt[:8]) for prompt in prompts}) == 7


SECONDS = st.floats(1e-3, 1e3)
ROUNDS = st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=12)


def speedup(rounds: list[tuple[float, float]]) -> str:
    return times_faster([base for base, _ in rounds], [time for _, time in rounds])


def of_ratios(*ratios: float) -> str:
    return speedup([(ratio, 1.0) for ratio in ratios])


@given(ROUNDS)
def test_a_difference_is_shown_only_if_every_round_shows_it(
    rounds: list[tuple[float, float]],
) -> None:
    ratios = [base / time for base, time in rounds]
    one_side = max(ratios) < 1 or min(ratios) > 1
    assert (UNSHOWN in speedup(rounds)) == (len(rounds) < LEAST or not one_side)


@given(ROUNDS)
def test_the_median_comes_with_its_range_if_shown(rounds: list[tuple[float, float]]) -> None:
    sentence, ratios = speedup(rounds), [base / time for base, time in rounds]
    median = f"{statistics.median(ratios):.2f}x ("
    assert sentence.startswith(median) == (UNSHOWN not in sentence)
    assert f"({min(ratios):.2f}x to {max(ratios):.2f}x)" in sentence
    assert speedup(rounds[::-1]) == sentence


def test_servers_of_equal_speed_are_told_apart_as_rarely_as_stated() -> None:
    """Each round of equal servers is a coin: of all that six coins can show, 2 in 64 mislead."""
    tosses = [of_ratios(*ratios) for ratios in product((0.9, 1.1), repeat=LEAST)]
    assert sum(UNSHOWN not in toss for toss in tosses) / len(tosses) == 1 / 32


def test_in_words() -> None:
    assert of_ratios(2.5, 2.4, 2.6, 2.5, 2.5, 2.7) == "2.50x (2.40x to 2.70x)"
    assert of_ratios(0.8, 0.8, 0.9, 0.8, 0.8, 0.8) == "0.80x (0.80x to 0.90x)"
    assert of_ratios(2.5, 2.4, 6.8, 2.5, 2.5, 2.7) == "2.50x (2.40x to 6.80x)"
    assert of_ratios(1.2, 1.1, 0.9, 1.2, 1.2, 1.2) == "no difference shown (0.90x to 1.20x)"
    assert of_ratios(2.5, 2.5, 2.5) == "no difference shown (2.50x to 2.50x)"
    # What one shot on each of three machines gave.
    assert UNSHOWN in of_ratios(2.6, 2.9, 6.8)
