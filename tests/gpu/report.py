"""One JSON of what the GPU tests found, written after each, to which a later run adds.

    python -m pytest -p tests.gpu.report --gpu-report FILE --gpu-seconds 570 -m gpu tests/gpu

A test that is in FILE with an outcome is not run again. Before a test begins its name is in FILE
under "running": whoever finds it there after the process ended knows who ended it.
"""

from __future__ import annotations

import faulthandler
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_indexcache.library.writing import write_json
from tests.fixtures.machine import facts, preflight

SAME = ("name", "commit")
"""Facts of the machine that a run must share with the one whose file it adds to."""
LONGEST_SECONDS = 300
"""A test without a ``limit`` ends the process after so long: a kernel that hangs can do no less."""
LOST_CONTEXT = ("CUDA error", "device-side assert")
"""In a failure: nothing in this process can use the card any more."""
AGAIN = 75
"""Exit code of a run that is to be started again, for the tests that are left."""


class Report:
    """The file, and what it says.

    Raises:
        pytest.UsageError: the file is of another machine or commit.
    """

    def __init__(self, path: Path, seconds: float) -> None:
        self.path, self.ends = path, time.monotonic() + seconds
        machine = facts()
        fresh = {"machine": machine, "preflight": preflight(machine), "tests": {}, "remembered": {}}
        self.content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else fresh
        for name in SAME:
            then = self.content["machine"][name]
            if then != machine[name]:
                raise pytest.UsageError(
                    f"{path} is of another run ({name} {then}, now {machine[name]}): remove it, or "
                    "name another file"
                )
        if ended := self.content.pop("running", None):
            self.decide(ended, "failed", "the process ended in it, or it took too long")

    def decide(self, name: str, outcome: str, why: str = "", **more: Any) -> None:
        """Record the outcome of a test, and write the report."""
        self.content.pop("running", None)
        self.content["tests"][name] = {"outcome": outcome, "why": why, **more}
        self.write()

    def begin(self, name: str) -> None:
        """Write that a test runs."""
        self.content["running"] = name
        self.write()

    def write(self) -> None:
        """Write all of it, in one step."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.path, self.content)

    def lines(self) -> Iterator[str]:
        """Yield a line on each test, for a person."""
        machine = self.content["machine"]
        yield f"{machine['name']}, torch {machine['torch']}, commit {machine['commit']}"
        yield self.content["preflight"]
        for name, record in self.content["tests"].items():
            why = f": {' '.join(record['why'].split())[-300:]}" if record["why"] else ""
            yield f"{record['outcome']:>12}  {name.partition('tests/gpu/')[2] or name}{why}"


REPORT = pytest.StashKey[Report]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add options for the file and the time."""
    group = parser.getgroup("gpu")
    group.addoption("--gpu-report", type=Path, required=True, help="JSON to write and to add to")
    group.addoption("--gpu-seconds", type=float, default=1e9, help="begin no test after so many")


def pytest_configure(config: pytest.Config) -> None:
    """Open the file."""
    path = config.getoption("--gpu-report")
    config.stash[REPORT] = Report(path, config.getoption("--gpu-seconds"))


def pytest_report_header(config: pytest.Config) -> str:
    """Say before anything runs whether this is the machine that was packed for."""
    return f"preflight: {config.stash[REPORT].content['preflight']}"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is decided; what was skipped is tried again."""
    records = config.stash[REPORT].content["tests"]
    decided = [item for item in items if records.get(item.nodeid, {}).get("outcome") in _DECIDED]
    config.hook.pytest_deselected(items=decided)
    items[:] = [item for item in items if item not in decided]


_DECIDED = ("passed", "failed")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Name the test before it can end the process."""
    report, limit = item.config.stash[REPORT], item.get_closest_marker("limit")
    seconds_left = report.ends - time.monotonic()
    if seconds_left <= 0:
        report.decide(item.nodeid, "not reached", "no time was left")
        item.add_marker(pytest.mark.skip(reason="no time was left"))
        return (yield)
    report.begin(item.nodeid)
    seconds = limit.args[0] if limit else LONGEST_SECONDS
    faulthandler.dump_traceback_later(min(seconds, max(seconds_left, 1)), exit=True)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Note the outcome; stop where the card cannot be used any more."""
    outcome = yield
    report = item.config.stash[REPORT]
    if outcome.when == "call" or not outcome.passed:
        why = outcome.longreprtext[-2000:] if outcome.failed else ""
        why = str(outcome.longrepr[2]) if outcome.skipped else why  # type: ignore[index]
        evidence = getattr(item, "gpu_evidence", {})
        if why != "Skipped: no time was left":
            report.decide(
                item.nodeid,
                outcome.outcome,
                why,
                seconds=round(outcome.duration, 2),
                evidence=evidence,
            )
        if outcome.failed and any(words in why for words in LOST_CONTEXT):
            pytest.exit("the card's context is lost", returncode=AGAIN)
    return outcome


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """The whole file, earlier runs included."""
    report = config.stash[REPORT]
    terminalreporter.section("GPU tests")
    for line in report.lines():
        terminalreporter.write_line(line)
    terminalreporter.write_line(f"wrote {report.path}")
