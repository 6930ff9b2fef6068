"""Pattern files: what is shipped, and errors that name the field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglang_indexcache.errors import LibraryError
from sglang_indexcache.library import Library, load_entry
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


def test_two_files_may_not_share_a_name(tmp_path: Path) -> None:
    write(tmp_path, GOOD)
    write(tmp_path, GOOD, "other.yaml")
    with pytest.raises(LibraryError, match="repeats the pattern name 'mine'"):
        _ = Library([tmp_path]).entries
