"""Benchmarks write into the committed results only when told, and keep their command."""

from __future__ import annotations

import argparse
import re
import runpy
import sys
from pathlib import Path

import pytest

import benchmarks
from benchmarks.records import RESULTS, RUNS, read_arguments

FOLDER = Path(benchmarks.__file__).parent
WRITERS = sorted(
    ".".join(path.relative_to(FOLDER.parent).with_suffix("").parts)
    for path in FOLDER.rglob("*.py")
    if "read_arguments(" in path.read_text() and path.name != "records.py"
)


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(prog="x.py")
    arguments.add_argument("--rows", type=int, default=64)
    return arguments


def test_the_committed_results_are_left_alone_unless_told() -> None:
    assert read_arguments(parser(), "a.json", []).output == RUNS / "a.json"
    assert read_arguments(parser(), "a.json", ["--output", "here"]).output == Path("here")
    assert read_arguments(parser(), "a.json", ["--publish"]).output == RESULTS / "a.json"


def test_a_quick_run_is_small_and_never_published(capsys: pytest.CaptureFixture[str]) -> None:
    assert read_arguments(parser(), "a", ["--quick"], {"rows": 2}).rows == 2
    assert read_arguments(parser(), "a", ["--quick", "--rows", "9"], {"rows": 2}).rows == 9
    with pytest.raises(SystemExit):
        read_arguments(parser(), "a", ["--quick", "--publish"], {"rows": 2})
    assert "published" in capsys.readouterr().err


def test_the_command_can_be_typed_again() -> None:
    arguments = read_arguments(parser(), "a", ["--output", "a b", "--rows", "3"])
    assert arguments.command.endswith("--output 'a b' --rows 3")


def test_every_benchmark_that_writes_asks_where() -> None:
    """Exempt are those whose output is required, that pack for a card or that read from one."""
    required = {"benchmarks.random_model"}
    required |= {"benchmarks.training.__main__", "benchmarks.training.trainer"}
    spared = {"benchmarks.records", "benchmarks.readme", *required}
    spared |= {"benchmarks.card.pack", "benchmarks.card.phases", "benchmarks.kernels.speed"}
    # Where their drivers say: the servers of a card, and the record beside the kernels' one.
    spared |= {f"benchmarks.card.{name}" for name in ("plugin", "servers", "served", "measured")}
    for path in FOLDER.rglob("*.py"):
        module = ".".join(path.relative_to(FOLDER.parent).with_suffix("").parts)
        if module in spared:
            continue
        writes = re.search(r"\b(write_json|write_whole)\(", path.read_text())
        assert not writes or module in WRITERS, f"{module} writes and does not ask where"


@pytest.mark.parametrize("module", WRITERS)
def test_every_benchmark_tells_its_options(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    monkeypatch.delitem(sys.modules, module, raising=False)  # runpy warns of what is imported
    with pytest.raises(SystemExit) as end:
        runpy.run_module(module, run_name="__main__")
    assert end.value.code == 0
    help_text = capsys.readouterr().out
    assert "--publish" in help_text
    assert "--quick" in help_text or module == "benchmarks.card.record"
