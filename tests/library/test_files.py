"""Pattern files: what is shipped, and errors that name the field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglang_indexcache.errors import LibraryError
from sglang_indexcache.library.files import load_entry
from sglang_indexcache.library.resolve import Library
from sglang_indexcache.pattern import Pattern
from tests.library.entries import GOOD, write

PAPER = {  # name: (layers, F layers) as the paper's appendix states them
    "glm-4.7-flash-dsa-1of2": (47, 24),
    "glm-4.7-flash-dsa-1of4": (47, 12),
    "glm-4.7-flash-dsa-1of8": (47, 7),
    "glm-5-1of2": (78, 40),
    "glm-5-1of4": (78, 22),
}


def test_the_papers_patterns_are_complete(library: Library) -> None:
    assert library.entries.keys() >= PAPER.keys()
    for name, (layers, full) in PAPER.items():
        entry = library.get(name)
        assert len(entry.parsed) == layers
        assert len(entry.parsed.full_layers) == full
        assert entry.source.url == "https://arxiv.org/abs/2603.12201"
        assert entry.quality
        assert all(row.where in {"Table 2", "Table 4"} for row in entry.quality)
        assert all(row.where == "Table 1" for row in entry.latency)


def test_glm5_quarter_is_the_published_list(library: Library) -> None:
    published = (0, 1, 3, 7, 10, 12, 20, 27, 31, 33, 38, 39, 40, 41, 42, 46, 47, 51, 60, 64, 71, 73)
    assert library.get("glm-5-1of4").parsed.full_layers == published


def test_good_file(tmp_path: Path) -> None:
    assert load_entry(write(tmp_path, GOOD)).parsed == Pattern("FSFS")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pattern": "FSXS"}, "pattern: the pattern contains 'X'"),
        ({"pattern": "FSF"}, "1 too short"),
        ({"full_layers": 3}, "full_layers says 3, the pattern has 2 F"),
        ({"retention": "half"}, "retention: String should match"),
        ({"name": "a b"}, "name: String should match"),
        ({"patern": "FSFS"}, "patern: Extra inputs are not permitted"),
        ({"model": {"name": "m", "architectures": [], "num_layers": 4}}, "model.architectures"),
    ],
)
def test_schema_errors_name_the_field(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = write(tmp_path, {**GOOD, **change})
    with pytest.raises(LibraryError, match=message) as caught:
        load_entry(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("pattern: [FSFS", "not valid YAML"),
        ("pattern: FSFS\npattern: FSSS", "not valid YAML: line 2 gives 'pattern' again"),
        ("just text", "expected a mapping"),
        ("", "expected a mapping"),
        ("name: mine", "pattern: Field required"),
    ],
)
def test_broken_files(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(LibraryError, match=message):
        load_entry(write(tmp_path, content))


def test_binary_file_is_not_yaml(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(LibraryError, match="not valid YAML"):
        load_entry(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("name: mine # " + "x" * (64 << 10), "is larger than 64 KiB"),
        ("pattern: " + "[" * 5000, "stand in one another too deeply"),
        ("pattern: " + "[" * 5000 + "]" * 5000, "stand in one another too deeply"),
        ("- " * 20_000, "stand in one another too deeply"),
        ("{a: " * 5000, "stand in one another too deeply"),
    ],
    ids=["comment", "open brackets", "brackets", "lists", "mappings"],
)
def test_input_without_end_is_one_sentence(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(LibraryError, match=message):
        load_entry(write(tmp_path, content))


def test_a_file_without_end_is_not_read_to_it() -> None:
    with pytest.raises(LibraryError, match="is larger than 64 KiB"):
        load_entry(Path("/dev/zero"))


BAD = {
    "half.yaml": "pattern: [FSFS",
    "text.yaml": "just text",
    "other.yaml": {**GOOD, "full_layers": 3},
    "spelt.yaml": {**GOOD, "name": "FSSF"},
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_left_out_and_the_others_stay(tmp_path: Path, name: str) -> None:
    write(tmp_path, GOOD)
    path = write(tmp_path, BAD[name], name)
    library = Library([tmp_path])
    assert list(library.entries) == ["mine"]
    [why] = library.left_out
    assert str(path) in str(why)
    assert library.digest == _without(library, tmp_path, path)


def test_every_suffix_of_yaml_is_read(tmp_path: Path) -> None:
    for name in ("a.yml", "b.YAML", "c.yaml"):
        write(tmp_path, {**GOOD, "name": name[0]}, name)
    write(tmp_path, "notes", "d.txt")
    assert list(Library([tmp_path]).entries) == ["a", "b", "c"]
    assert Library([tmp_path]).left_out == []


def _without(library: Library, folder: Path, path: Path) -> str:
    """Return the digest of the folder without a file."""
    path.unlink()
    return Library([folder]).digest


def test_a_folder_that_cannot_be_listed_is_no_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    [why] = Library([tmp_path]).left_out
    assert f"cannot read the folder {tmp_path}: Permission denied" in str(why)


def test_of_two_files_of_one_name_the_second_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, GOOD)
    write(tmp_path, {**GOOD, "pattern": "FFSS"}, "other.yaml")
    library = Library([tmp_path])
    [why] = library.left_out
    assert "other.yaml repeats the pattern name 'mine'" in str(why)
    assert library.entries["mine"].pattern == "FSFS"


def test_the_digest_is_of_what_names_stand_for(tmp_path: Path) -> None:
    digests = set()
    for number, changes in enumerate(
        ({}, {"pattern": "FFSS"}, {"name": "other"}, {"model": {**GOOD["model"], "name": "n"}})
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        write(folder, {**GOOD, **changes}, f"{number}.yaml")
        digests.add(Library([folder]).digest)
    assert len(digests) == 4
    write(tmp_path, {**GOOD, "source": {"title": "elsewhere"}}, "named otherwise.yaml")
    assert Library([tmp_path]).digest in digests
