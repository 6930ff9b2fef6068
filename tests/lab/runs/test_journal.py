"""A journal's lines are whole, and whoever measures the same continues it."""

from pathlib import Path

import pytest

from sglang_indexcache.errors import OutputError, SearchError
from sglang_indexcache.lab.runs.journal import Journal
from tests.full_disk import files_of_at_most


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


def test_a_journal_is_one_processs_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    message = r"journal.jsonl is in use by another search\. Wait for it, or"
    with journal(path), pytest.raises(SearchError, match=message):
        journal(path)
    journal(path).close()


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
