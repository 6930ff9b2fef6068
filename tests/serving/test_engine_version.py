"""Which SGLang will do: judged by digests, told in one line or one error."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from sglang_indexcache.cli import app
from sglang_indexcache.errors import UnsupportedEngineError
from sglang_indexcache.serving import engine_version
from sglang_indexcache.serving.engine_version import (
    EngineSource,
    check,
    judge,
    record,
    recorded,
    show,
)
from sglang_indexcache.serving.seams import Seam
from tests.serving.sglang_tree import MODULE, source, write

NAMES = tuple("abcdefgh")
CODE = "".join(f"def {name}(x):\n    return {name!r}\n\n\n" for name in NAMES)
SEAMS = tuple(Seam(MODULE, name, f"for {name}", ("x",)) for name in NAMES)

Make = Callable[..., EngineSource]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    count = iter(range(100))

    def an_sglang(version: str | None, code: str = CODE) -> EngineSource:
        return source(tmp_path / str(next(count)), code, version)

    return an_sglang


@pytest.fixture(autouse=True)
def one_tested_version(tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch) -> EngineSource:
    """1.0 is recorded and installed."""
    tested = make("1.0")
    monkeypatch.setattr(engine_version, "SEAMS", SEAMS)
    monkeypatch.setattr(engine_version, "RECORDS", tmp_path / "seams.json")
    monkeypatch.setattr(EngineSource, "installed", classmethod(lambda cls: tested))
    (tmp_path / "seams.json").write_text("{}")
    record(tested)
    return tested


def changed(*names: str, code: str = CODE) -> str:
    for name in names:
        code = code.replace(f"return {name!r}", "return None")
    return code


def test_the_tested_version_starts_without_a_word(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    check(make("1.0"))
    assert caplog.records == []


def test_another_version_starts_with_one_line_if_nothing_moved(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        check(make("1.1", f"# new\n{CODE}def z(): ...\n"))
    assert caplog.messages == [
        "IndexCache: SGLang 1.1 was not tested; everything that IndexCache relies on is as in 1.0"
    ]


def test_another_version_is_refused_with_what_moved(make: Make) -> None:
    code = changed("a").replace("def b(x)", "def b(y)").replace("def c(", "def no(")
    with pytest.raises(UnsupportedEngineError) as error:
        check(make("1.1", code))
    message = str(error.value)
    assert "SGLang 1.1 was not tested, and of the 8 places" in message
    assert "3 differ from 1.0: " in message
    for problem in ("a has changed", "b no longer takes x", "c is gone"):
        assert f"{MODULE}.{problem}" in message
    assert "more" not in message.split("All that")[0]
    assert "pip install 'sglang==" in message
    assert "indexcache server doctor --sglang" in message


def test_an_error_names_the_first_that_moved_and_counts_the_others(make: Make) -> None:
    with pytest.raises(UnsupportedEngineError, match=r"e has changed; and 3 more\.") as error:
        check(make("1.1", changed(*NAMES)))
    assert f"{MODULE}.f " not in str(error.value)


def test_a_changed_installation_is_to_be_reinstalled(make: Make) -> None:
    message = r"this SGLang 1\.0 is not the one .*h has changed.*--force-reinstall 'sglang==1\.0'"
    with pytest.raises(UnsupportedEngineError, match=message):
        check(make("1.0", changed("h")))


def test_a_missing_module_is_named(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_version, "SEAMS", (Seam("sglang.srt.lost", "x", ""),))
    with pytest.raises(UnsupportedEngineError, match=r"module sglang\.srt\.lost is gone"):
        check(make("1.1"))


def test_the_nearest_tested_version_is_the_measure(make: Make) -> None:
    record(make("1.2", changed("a", "b", "c")))
    assert judge(make("1.1", changed("a"))).tested == "1.0"
    verdict = judge(make("1.3", changed("a", "b")))
    assert verdict.tested == "1.2"
    assert [seam.name for seam, _ in verdict.moved] == ["c"]
    assert judge(make("1.0", changed("a", "b", "c"))).tested == "1.0"


def test_a_seam_that_was_not_recorded_says_how(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_version, "SEAMS", (*SEAMS, Seam(MODULE, "z", "")))
    with pytest.raises(UnsupportedEngineError, match=r"z is not recorded \(python -m sglang_in"):
        check(make("1.0", f"{CODE}z = 1\n"))


def test_recording_keeps_the_others_and_is_the_same_again(make: Make) -> None:
    record(make("1.1", changed("a")))
    first = engine_version.RECORDS.read_text()
    assert list(recorded()) == ["1.0", "1.1"]
    record(make("1.0"))
    assert engine_version.RECORDS.read_text() == first
    assert json.loads(first)["1.0"] != json.loads(first)["1.1"]


@pytest.mark.parametrize("code", [CODE.replace("(x)", "(y)"), CODE.replace("def a", "def z")])
def test_what_the_table_names_wrongly_is_not_recorded(make: Make, code: str) -> None:
    with pytest.raises(UnsupportedEngineError, match="cannot be recorded"):
        record(make("1.1", code))
    assert list(recorded()) == ["1.0"]


def shown(place: Path) -> tuple[bool, str]:
    console = Console(file=io.StringIO(), width=200, record=True)
    good = show(place, console)
    return good, console.export_text()


def test_what_moved_is_listed(tmp_path: Path) -> None:
    other = source(tmp_path / "other", changed("a", "b"), "1.1")
    good, text = shown(other.root)
    assert not good
    assert f"{MODULE}.a has changed (for a)\n  {MODULE}.b has changed (for b)" in text


def test_the_command_tells_by_its_exit_code(tmp_path: Path) -> None:
    def run(place: Path) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["server", "doctor", "--sglang", str(place)])
        return result.exit_code, result.output

    assert run(write(tmp_path / "same", CODE, "1.1")) == (
        0,
        "SGLang 1.1 was not tested; everything that IndexCache relies on is as in 1.0.\n",
    )
    code, text = run(write(tmp_path / "other", changed("a"), "1.1"))
    assert code == 1
    assert f"{MODULE}.a has changed (for a)" in text
    code, text = run(tmp_path)
    assert code == 1
    assert "there is no SGLang in" in text
