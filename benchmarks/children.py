"""Processes with a time limit: whatever faults or hangs in one leaves the others alone."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESERVE_SECONDS = 15
"""Kept of a clock's time, for the report."""


@dataclass
class Clock:
    """The time that is left."""

    seconds: float

    def __post_init__(self) -> None:
        self._started = time.perf_counter()

    def left(self, at_most: float = float("inf")) -> float:
        """Seconds for the next step."""
        passed = time.perf_counter() - self._started
        return max(1.0, min(at_most, self.seconds - RESERVE_SECONDS - passed))

    def step(self, seconds: float) -> "Clock":
        """A clock for one step, whose jobs share its time however many wait their turn."""
        return Clock(self.left(seconds) + RESERVE_SECONDS)


@dataclass(frozen=True)
class Finished:
    """A child's lines of JSON and how it ended."""

    lines: list[dict[str, Any]]
    problem: str | None
    output: str


def run(command: list[str], seconds: float, *, group: bool = False) -> Finished:
    """Run a child to its end or its time limit.

    Args:
        group: at the limit stop its own children too, those that share its process group.
    """
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    pipe = subprocess.PIPE
    try:
        child = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, start_new_session=group
        )
    except OSError as error:
        return Finished([], str(error), "")
    try:
        out, err = child.communicate(timeout=seconds)
        problem = None if child.returncode == 0 else f"exit code {child.returncode}"
    except subprocess.TimeoutExpired:
        if group:
            os.killpg(child.pid, signal.SIGKILL)
        child.kill()
        out, err = child.communicate()
        problem = f"stopped after {seconds:.0f} s"
    text, errors = (stream.decode(errors="replace") for stream in (out, err))
    lines = []
    for line in text.splitlines():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    lines = [line for line in lines if isinstance(line, dict)]
    return Finished(lines, problem, (text + errors)[-4000:])


def module(name: str, *options: str) -> list[str]:
    """The command that runs a module."""
    return [sys.executable, "-m", name, *options]
