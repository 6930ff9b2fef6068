"""Files that are replaced in one step, also where the disk is full."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_indexcache.errors import OutputError
from sglang_indexcache.library.writing import replacing, write_json, write_whole
from tests.full_disk import files_of_at_most


def test_on_a_full_disk_the_file_is_as_it_was_and_half_a_file_takes_no_room(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "result.json"
    write_json(path, {"old": True})
    before = path.read_bytes()
    with (
        files_of_at_most(1000),
        pytest.raises(OutputError, match=r"^cannot write \S*result.json: File too large\. .* room"),
    ):
        write_whole(path, "x" * 5000)
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == ["result.json"]
    write_whole(path, "x" * 5000)
    assert path.stat().st_size == 5000


def test_what_a_library_raises_is_told_alike(tmp_path: Path) -> None:
    with (
        pytest.raises(OutputError, match=r"cannot write .*: no more room"),
        replacing(tmp_path / "state", RuntimeError),
    ):
        raise RuntimeError("no more room\nand a trace")


def test_our_own_mistakes_stay_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"^a mistake$"), replacing(tmp_path / "state"):
        raise RuntimeError("a mistake")
    assert not list(tmp_path.iterdir())
