"""Processes with a time limit."""

import sys

import pytest

from benchmarks.children import Clock, run


def test_a_child_is_stopped_in_time() -> None:
    code = "import time; print('{\"line\": 1}', flush=True); time.sleep(60)"
    done = run([sys.executable, "-c", code], 5)
    assert done.lines == [{"line": 1}]
    assert done.problem == "stopped after 5 s"


def test_a_command_that_is_not_there() -> None:
    assert "No such file" in str(run(["/nowhere/tool"], 5).problem)


def test_jobs_of_a_step_share_its_time() -> None:
    clock = Clock(1000)
    step = clock.step(0.5)
    assert step.left() <= 1.0  # the least that any job gets
    assert clock.step(100).left() == pytest.approx(100, abs=1)
    assert Clock(30).step(100).left() == pytest.approx(15, abs=1)
