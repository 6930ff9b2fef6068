"""A run can be stopped, says how to continue, and how far it is."""

import io
import os
import signal
from pathlib import Path

import pytest
from rich.console import Console

from sglang_indexcache.lab.runs import progress as progress_module
from sglang_indexcache.lab.runs.progress import (
    print_plan,
    progress_at_most,
    resumable,
    resuming,
    time_in_words,
)


@pytest.mark.parametrize(
    ("hours", "words"),
    [(3.14, "3.1 hours"), (0.75, "45 minutes"), (0.046, "3 minutes"), (0.002, "7 seconds")],
)
def test_short_times_are_no_share_of_an_hour(hours: float, words: str) -> None:
    assert time_in_words(hours) == words


def test_a_plan_is_written_in_two_columns() -> None:
    console = Console(file=io.StringIO(), width=20)
    print_plan(console, [("data", "documents [of a user]"), ("objective", "loss")])
    assert console.file.getvalue() == (  # type: ignore[attr-defined]
        "data       documents [of a user]\nobjective  loss\n"
    )


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
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text == f"interrupted: what was found is in {tmp_path}; the same command continues\n"


def test_a_run_that_ends_by_itself_says_nothing(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=500)
    with resumable(console, tmp_path):
        resuming(console, 0, "evaluations", tmp_path)
    assert console.file.getvalue() == ""  # type: ignore[attr-defined]
    resuming(console, 1200, "evaluations", tmp_path)
    assert "1,200 evaluations in" in console.file.getvalue()  # type: ignore[attr-defined]


def test_progress_is_told_in_lines_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress_module, "LINE_EVERY", 0.0)
    output = io.StringIO()
    with progress_at_most(Console(file=output, width=80)) as progress:
        task = progress.add_task("asking", total=4)
        for number in range(3):
            progress.update(task, completed=number)
        progress.advance(task)
    assert "asking: 25 %" in output.getvalue()
    assert "asking: 75 %" in output.getvalue()
    assert "left at most" in output.getvalue()


def test_progress_that_is_drawn_is_not_told() -> None:
    output = io.StringIO()
    with progress_at_most(Console(file=output, width=80, force_terminal=True)) as progress:
        task = progress.add_task("asking", total=4)
        progress.update(task, completed=2)
        progress.advance(task)
    assert "asking:" not in output.getvalue()
