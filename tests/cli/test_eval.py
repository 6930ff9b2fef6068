"""``indexcache eval`` on the small checkpoint's tokens and a fake server."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import sglang_indexcache
from sglang_indexcache.cli import app
from sglang_indexcache.quality.journal import load
from tests.quality.fake_server import Fake, serving

TINY = Path(sglang_indexcache.__file__).parent / "demo" / "tiny-dsa"
SMALL = (
    *("--model", TINY, "--task", "notes", "--length", "256", "--contexts", "4"),
    *("--looks", "1", "--margin", "20"),
)


@pytest.fixture(autouse=True)
def haystack(tmp_path: Path) -> Path:
    path = tmp_path / "haystack.txt"
    path.write_text("\n".join(f"line {n} of {n * 7919 % 997}" for n in range(500)))
    return path


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def words(result: Result) -> str:
    return " ".join(result.output.split())


def test_an_evaluation_tells_its_cost_first_and_then_its_verdicts(
    tmp_path: Path, haystack: Path
) -> None:
    with serving(Fake()) as url:
        command = ("eval", "run", "1/4", "1/2", *SMALL, "--url", url, "-o", tmp_path / "out")
        result = call(*command, "--haystack", haystack)
        again = call(*command, "--haystack", haystack)
        other = call(*command, "--haystack", haystack, "--seed", "3")
    assert result.exit_code == 0, result.output
    said = words(result)
    assert said.index("cost ") < said.index("measured at") < said.index("1/2: ")
    assert "full (reference), 1/2 (candidate), 1/4 (candidate)" in said  # fewer F come later
    assert "can show a loss of" in said
    assert "resuming: 6 contexts" in words(again)
    assert "belongs to another evaluation; different: plan" in words(other)
    found = load(tmp_path / "out")
    assert found.finished
    assert [arm.name for arm in found.candidates] == ["1/2", "1/4"]
    assert found.facts["server"]["dtype"] == "bfloat16"
    assert found.facts["model"] == "tiny-dsa"
    assert {p.name for p in (tmp_path / "out").iterdir()} >= {"eval.json", "report.html"}


def test_more_than_an_hour_is_asked_for(tmp_path: Path, haystack: Path) -> None:
    fake = Fake()
    with serving(fake) as url:
        result = call(
            *("eval", "run", "1/4", *SMALL, "--url", url, "-o", tmp_path / "out"),
            *("--haystack", haystack, "--rate", "0.1"),
        )
    assert result.exit_code == 1
    assert "node-hours at 0 tokens a second. Go on?" in words(result)
    assert fake.calls == 0


def test_a_plan_sends_nothing(haystack: Path) -> None:
    result = call("eval", "plan", "uniform:1/4", *SMALL, "--haystack", haystack, "--rate", "10")
    assert result.exit_code == 0, result.output
    assert "node-hours at 10 tokens a second" in words(result)
    assert "can show a loss of" in words(result)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("1/4", "1/4"), "1/4 and 1/4 are the same pattern"),
        (("full",), "full and full are the same pattern"),
        (("uniform:1/4", "--control", "FSSSFSSSFSSS"), "are the same pattern, FSSSFSSSFSSS"),
        (("1/4", "--length", "64"), "64 tokens can show nothing"),
        (("1/4", "--haystack", "nowhere.txt"), "cannot read nowhere.txt"),
    ],
)
def test_what_cannot_be_planned_is_refused(arguments: tuple[str, ...], said: str) -> None:
    result = call("eval", "plan", *SMALL, *arguments)
    assert result.exit_code == 1
    assert said in words(result)


def test_a_context_that_the_server_does_not_take_is_refused(tmp_path: Path) -> None:
    fake = Fake(info={"max_req_input_len": 255})
    with serving(fake) as url:
        result = call("eval", "run", "1/4", *SMALL, "--url", url, "-o", tmp_path / "out")
    assert result.exit_code == 1
    assert "256 tokens with question and answer does not fit" in words(result)
    assert fake.calls == 0


@pytest.mark.parametrize(
    ("urls", "said"),
    [
        ((), "give a server in live mode with --url"),
        (("http://a", "http://b"), "two servers are given for all arms; write NAME=URL"),
        (("full=http://a", "full=http://b"), "two servers are given for full"),
    ],
)
def test_servers_are_named(tmp_path: Path, urls: tuple[str, ...], said: str) -> None:
    given = [part for url in urls for part in ("--url", url)]
    result = call("eval", "run", "1/4", *SMALL, "-o", tmp_path / "out", *given)
    assert result.exit_code == 1
    assert said in words(result)
