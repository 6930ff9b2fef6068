"""Processes with a time limit."""

import sys
import time
from pathlib import Path

import pytest

from benchmarks.children import Clock, run


def test_a_child_is_stopped_in_time() -> None:
    code = "import time; print('{\"line\": 1}', flush=True); time.sleep(60)"
    done = run([sys.executable, "-c", code], 5, group=True)
    assert done.lines == [{"line": 1}]
    assert done.problem == "stopped after 5 s"


def test_a_group_is_stopped_with_its_own_children(tmp_path: Path) -> None:
    """A grandchild that ran on would disturb what is checked next."""
    pid = tmp_path / "pid"
    grandchild = [sys.executable, "-c", "import time; time.sleep(60)"]
    code = (
        "import pathlib, subprocess\n"
        f"child = subprocess.Popen({grandchild!r}, stdout=-3, stderr=-3)\n"  # -3: to nowhere
        f"pathlib.Path({str(pid)!r}).write_text(str(child.pid))\n"
        "child.wait()\n"
    )
    done = run([sys.executable, "-c", code], 5, group=True)
    assert done.problem == "stopped after 5 s"
    status = Path(f"/proc/{pid.read_text()}/status")
    for _ in range(50):
        if not status.exists() or "zombie" in status.read_text():
            return
        time.sleep(0.1)
    raise AssertionError("the grandchild runs on")


def test_a_command_that_is_not_there() -> None:
    assert "No such file" in str(run(["/nowhere/tool"], 5).problem)


def test_jobs_of_a_step_share_its_time() -> None:
    clock = Clock(1000)
    step = clock.step(0.5)
    assert step.left() <= 1.0  # the least that any job gets
    assert clock.step(100).left() == pytest.approx(100, abs=1)
    assert Clock(30).step(100).left() == pytest.approx(15, abs=1)
