"""A long run can be stopped by Ctrl-C and by SIGTERM, and says how to continue."""

import io
import os
import signal
from pathlib import Path

import pytest
from rich.console import Console

from sglang_indexcache.study.journal import resumable, resuming


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_and_says_how_to_continue(
    number: signal.Signals, tmp_path: Path
) -> None:
    console = Console(file=io.StringIO(), width=500)
    before = signal.getsignal(signal.SIGTERM)
    # What a shell starts in the background ignores Ctrl-C, and so would these tests.
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), resumable(console, tmp_path, "what was found"):
            os.kill(os.getpid(), number)
    finally:
        signal.signal(signal.SIGINT, inherited)
    assert signal.getsignal(signal.SIGTERM) is before
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert said == f"interrupted: what was found is in {tmp_path}; the same command continues\n"


def test_a_run_that_ends_by_itself_says_nothing(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=500)
    with resumable(console, tmp_path):
        resuming(console, 0, "evaluations", tmp_path)
    assert console.file.getvalue() == ""  # type: ignore[attr-defined]
    resuming(console, 1200, "evaluations", tmp_path)
    assert "1,200 evaluations in" in console.file.getvalue()  # type: ignore[attr-defined]
