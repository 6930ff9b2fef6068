"""A run's folder belongs to that run, which can be stopped, and says how to continue."""

import io
import os
import signal
from pathlib import Path

import pytest
from rich.console import Console

from sglang_indexcache.errors import OutputError, SearchError
from sglang_indexcache.lab.runs import journal as journals
from sglang_indexcache.lab.runs.journal import (
    Journal,
    claim,
    differences,
    locked,
    progress_at_most,
    resumable,
    resuming,
)
from tests.full_disk import files_of_at_most


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


def test_differences_are_named_down_to_the_value_that_differs() -> None:
    then = {"model": "a", "plan": {"seed": 0, "rows": list(range(99)), "task": "x"}}
    now = {"model": "a", "plan": {"seed": 1, "rows": list(range(98)), "task": "x"}, "dp": 2}
    assert list(differences(then, now)) == [
        "dp (None then, 2 now)",
        "plan rows",  # too long to be written out
        "plan seed (0 then, 1 now)",
    ]
    assert list(differences(then, then)) == []


def test_the_option_that_changed_is_named_and_no_hash(tmp_path: Path) -> None:
    path = tmp_path / "options.json"
    then = {"data": "a" * 64, "given": {"--context": 128, "--seed": 0}}
    claim(path, then, "search", SearchError)
    claim(path, then | {"given": {"--context": 160, "--seed": 0}}, "search", SearchError)
    now = {"data": "b" * 64, "given": {"--context": 160, "--seed": 0}}
    with pytest.raises(SearchError, match=r"different: data; --context \(128 then, 160 now\)\. "):
        claim(path, now, "search", SearchError)


def test_a_folder_is_claimed_once_and_continued_with_the_same_options_alone(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "options.json"
    options = {"steps": 3, "rates": (1e-3, 1e-4)}  # tuples become lists in JSON, and stay the same
    claim(path, options, "heal", SearchError)
    claim(path, options, "heal", SearchError)
    with pytest.raises(SearchError, match=r"another heal; different: steps \(3 then, 4 now\)"):
        claim(path, options | {"steps": 4}, "heal", SearchError)
    for damaged in ("[1]", "{", "7"):
        path.write_text(damaged)
        with pytest.raises(SearchError, match="damaged"):
            claim(path, options, "heal", SearchError)


def journal(path: Path) -> Journal:
    return Journal(path, {"of": "a test"}, "search", SearchError)


def test_a_journal_in_which_nothing_was_measured_is_anybodys(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    for steps in (3, 4):  # the first was refused before it measured anything
        with Journal(path, {"steps": steps}, "search", SearchError) as opened:
            assert opened.entries == []
    assert len(path.read_bytes().splitlines()) == 1
    with Journal(path, {"steps": 4}, "search", SearchError) as opened:
        opened.write({"loss": 1.0})
    with pytest.raises(SearchError, match=r"different: steps \(4 then, 3 now\)"):
        Journal(path, {"steps": 3}, "search", SearchError)


def test_a_full_disk_leaves_whole_lines_and_what_follows_stands_behind_them(tmp_path: Path) -> None:
    path, numbers = tmp_path / "journal.jsonl", []
    with journal(path) as open_journal:
        with files_of_at_most(1000):
            for number in range(9):
                open_journal.write({"number": number, "rest": "x" * 70})
                numbers.append(number)
            with pytest.raises(OutputError, match=r"journal.jsonl: File too large"):
                open_journal.write({"number": 9, "rest": "x" * 70})
        assert path.read_bytes().endswith(b"}\n")
        open_journal.write({"number": 100})
    with journal(path) as again:
        assert [entry["number"] for entry in again.entries] == [*numbers, 100]


def test_a_disk_that_is_full_from_the_start(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with files_of_at_most(4096), pytest.raises(OutputError, match="cannot write"):
        Journal(path, {"of": "x" * 5000}, "search", SearchError)
    with Journal(path, {"of": "x" * 5000}, "search", SearchError) as again:
        assert again.entries == []


@pytest.mark.parametrize("cut", range(1, 20))
def test_a_last_line_that_was_torn_anywhere_is_written_again(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "journal.jsonl"
    with journal(path) as first:
        first.write({"number": 1})
        first.write({"number": 2})
    text = path.read_bytes()
    path.write_bytes(text[:-cut])
    with journal(path) as again:
        numbers = [entry["number"] for entry in again.entries]
        assert numbers == ([1] if cut <= len(b'{"number": 2}\n') else [])
        again.write({"number": 3})
    with journal(path) as third:
        assert [entry["number"] for entry in third.entries] == [*numbers, 3]


def test_a_lock_file_is_one_processs_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "lock"
    with (
        locked(path, "healing", SearchError),
        pytest.raises(SearchError, match=r"lock is in use by another healing\. Wait for it, or"),
        locked(path, "healing", SearchError),
    ):
        pass
    with locked(path, "healing", SearchError):
        pass


def test_progress_is_told_in_lines_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(journals, "LINE_EVERY", 0.0)
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
