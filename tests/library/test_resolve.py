"""Every way to name a pattern, and what cannot be one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from sglang_indexcache.checkpoint import Checkpoint
from sglang_indexcache.errors import IndexCacheError, LibraryError, PatternError
from sglang_indexcache.library.resolve import (
    LIBRARY_VARIABLE,
    Library,
    name_and_pattern,
    names_a_file,
)
from sglang_indexcache.pattern import Pattern
from tests.fakes.glm5 import CONFIG as GLM5
from tests.library.entries import GOOD, write

FOUR = Checkpoint("GlmMoeDsaForCausalLM", tuple(range(4)), Pattern.full(4), {})
TINY = Checkpoint.read(Path("sglang_indexcache/lab/demo/tiny-dsa"))


def glm5(**fields: Any) -> Checkpoint:
    return Checkpoint.from_config({**GLM5, **fields})


def test_model_is_recognised_by_shape(library: Library) -> None:
    names = [entry.name for entry in library.for_checkpoint(glm5())]
    assert names == ["glm-5-1of2", "glm-5-1of4"]
    assert library.for_checkpoint(glm5(hidden_size=4096)) == []
    # GLM-5.2 has the shape of GLM-5, but ships 21 indexers only.
    assert library.for_checkpoint(glm5(index_topk_freq=4, index_skip_topk_offset=3)) == []


@pytest.mark.parametrize(
    ("value", "name"),
    [("1/4", "glm-5-1of4"), ("1/2", "glm-5-1of2"), ("glm-5-1of4", "glm-5-1of4")],
)
def test_ratio_and_name_find_the_entry(library: Library, value: str, name: str) -> None:
    resolved = library.resolve(value, glm5())
    assert resolved.entry is not None
    assert resolved.entry.name == name
    assert name in resolved.description


def test_without_a_model_every_layer_must_be_named(library: Library) -> None:
    assert library.resolve("FSSF").pattern == Pattern("FSSF")
    entry = library.resolve("glm-5-1of4").entry
    assert entry == library.resolve(str(library.folders[0] / "glm-5-1of4.yaml")).entry
    assert entry is not None
    for value in ("full", "uniform:1/4", "1/4"):
        with pytest.raises(PatternError, match=f"{value}.*depends on the model"):
            library.resolve(value)


@pytest.mark.parametrize(
    ("value", "name", "pattern"),
    [
        ("mine=FSSF", "mine", "FSSF"),
        ("1/4=uniform:1/4", "1/4", "uniform:1/4"),
        ("full", "full", "full"),
        ("found/GLM-1of4.yaml", "GLM-1of4", "found/GLM-1of4.yaml"),
        ("=FSSF", "=FSSF", "=FSSF"),  # nobody's pattern, which is said of the whole
        ("mine=", "mine=", "mine="),
        ("mine=lr=1/a.yaml", "mine", "lr=1/a.yaml"),
    ],
)
def test_a_pattern_has_the_name_before_it_or_is_its_own(
    value: str, name: str, pattern: str
) -> None:
    assert name_and_pattern(value) == (name, pattern)


def test_the_path_of_a_file_may_hold_the_sign_behind_a_name(tmp_path: Path) -> None:
    path = tmp_path / "seed=1" / "GLM-1of4.yaml"
    path.parent.mkdir()
    path.touch()
    assert name_and_pattern(str(path)) == ("GLM-1of4", str(path))
    assert name_and_pattern(f"mine={path}") == ("mine", str(path))


def test_other_ways_to_say_it(library: Library, tmp_path: Path) -> None:
    checkpoint = glm5()
    assert library.resolve("full", checkpoint).pattern == Pattern.full(78)
    assert library.resolve("uniform:1/4", checkpoint).pattern == Pattern.uniform(78, 4)
    literal = "F" + "S" * 77
    assert str(library.resolve(literal, checkpoint).pattern) == literal
    path = tmp_path / "mine.yaml"
    path.write_text((Path("patterns") / "glm-5-1of4.yaml").read_text())
    assert str(path) in library.resolve(str(path), checkpoint).description


def test_full_means_all_that_the_checkpoint_ships(library: Library) -> None:
    shared = glm5(index_topk_freq=4, index_skip_topk_offset=3)
    assert library.resolve("full", shared).pattern == shared.own


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ("1/8", LibraryError, "no pattern at retention 1/8.*say uniform:1/8"),
        ("uniform:2/4", PatternError, "uniform:1/r"),
        ("uniform:1/0", PatternError, "uniform:1/r"),
        ("uniform:", PatternError, "uniform:1/r"),
        ("glm-6-1of4", LibraryError, "no pattern is called 'glm-6-1of4'. Near it: glm-5-1of4, "),
        (
            "x" * 900,
            LibraryError,
            r"characters more\. A pattern is a name of .*list` has the names",
        ),
        ("\u0661/\u0664", LibraryError, "cannot read pattern file"),
        ("uniform:1/\u0664", PatternError, "uniform:1/r"),
        ("uniform:1/\uff14", PatternError, "uniform:1/r"),
        ("glm-4.7-flash-dsa-1of4", PatternError, "has 47 indexer layers; .* has 78"),
        ("FSSS", PatternError, "74 too short"),
        ("fsss", PatternError, "capital letters"),
        ("F SS", PatternError, "white space"),
        ("FSXS", PatternError, "contains 'X'"),
        ("", PatternError, "empty"),
        ("SFFF", PatternError, "starts with S"),
        ("/no/such/file.yaml", LibraryError, "cannot read pattern file"),
        ("1/" + "9" * 5000, PatternError, "in small numbers such as 1/4.*4,902 characters more"),
        ("3/4", LibraryError, r"Search one on your data \(indexcache search run\)\.$"),
        ("1/79", LibraryError, r"Search one on your data \(indexcache search run\)\.$"),
        ("2/16", LibraryError, "say uniform:1/8 to"),
        ("1/1", PatternError, "a ratio is the share of indexers that stay.* full is all of them"),
        ("0/4", PatternError, "a ratio is the share of indexers that stay"),
        ("1/0", PatternError, "a ratio is the share of indexers that stay"),
        ("uniform:1/" + "9" * 5000, PatternError, "uniform:1/r.*4,910 characters more"),
        ("full < 32K <= 1/2", LibraryError, "one pattern is wanted here"),
    ],
)
def test_bad_values(
    library: Library, value: str, error: type[IndexCacheError], message: str
) -> None:
    with pytest.raises(error, match=message):
        library.resolve(value, glm5())


def test_a_model_that_shares_already_is_told_to_leave_the_pattern_out(library: Library) -> None:
    shared = glm5(index_topk_freq=4, index_skip_topk_offset=3)
    with pytest.raises(LibraryError) as caught:
        library.resolve("1/4", shared)
    message = str(caught.value)
    assert "It shares already, as it was trained to: 21 of 78 layers keep their indexer" in message
    assert message.endswith("Leave the pattern out.")
    assert "uniform" not in message


def test_a_pruned_model_is_told_whose_pattern_fits_its_layers(library: Library) -> None:
    with pytest.raises(LibraryError, match=r"and 168 experts\. glm-5-1of4 is for the same layers"):
        library.resolve("1/4", glm5(n_routed_experts=168))
    assert library.resolve("glm-5-1of4", glm5(n_routed_experts=168))
    with pytest.raises(LibraryError, match="Search one on your data"):
        library.resolve("1/8", glm5(n_routed_experts=168))
    with pytest.raises(LibraryError, match="Search one on your data"):
        library.resolve("1/4", glm5(n_routed_experts=168, hidden_size=4096))


def test_pattern_that_needs_missing_indexers(library: Library) -> None:
    shared = glm5(index_topk_freq=4, index_skip_topk_offset=3)
    with pytest.raises(PatternError, match="ships no indexer weights there"):
        library.resolve("glm-5-1of4", shared)


def test_own_folder_joins_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, GOOD)
    monkeypatch.setenv(LIBRARY_VARIABLE, str(tmp_path))
    assert "mine" in Library.default().entries


def test_a_folder_that_is_not_there_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for missing in (tmp_path / "typo", write(tmp_path, GOOD)):
        monkeypatch.setenv(LIBRARY_VARIABLE, f"{tmp_path}{os.pathsep}{missing}")
        with pytest.raises(LibraryError, match=f"names {missing}, which is no folder here. Make"):
            Library.default()


def test_letters_need_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(_: Path) -> None:
        raise AssertionError("a folder was read")

    monkeypatch.setattr("sglang_indexcache.library.resolve.read_folder", read)
    for value in ("FSSS", "full", "uniform:1/2"):
        assert Library([tmp_path]).resolve(value, FOUR)
    with pytest.raises(PatternError, match="empty"):
        Library([tmp_path]).resolve("", FOUR)


@pytest.mark.parametrize("value", ["1/2", "full", "FSFS", "mine", "uniform:1/2"])
def test_blanks_around_a_name_are_none_of_it(tmp_path: Path, value: str) -> None:
    write(tmp_path, GOOD)
    library = Library([tmp_path])
    plain = library.resolve(value, FOUR)
    for blanks in (f" {value} ", f"\t{value}\n", f"{value} "):
        for files in (False, True):
            assert library.resolve(blanks, FOUR, files=files) == plain


def test_an_unknown_name_says_that_files_are_left_out_and_not_which(tmp_path: Path) -> None:
    write(tmp_path, GOOD)
    message = r"`indexcache patterns list` has the names"
    with pytest.raises(LibraryError, match=rf"{message}\.$"):
        Library([tmp_path]).resolve("nobody", FOUR)
    write(tmp_path, "pattern: [FSFS", "half.yaml")
    with pytest.raises(LibraryError, match=f"{message}, and says why 1 file is left out.$") as one:
        Library([tmp_path]).resolve("nobody", FOUR)
    assert str(tmp_path) not in str(one.value)
    write(tmp_path, "text", "text.yaml")
    with pytest.raises(LibraryError, match=f"{message}, and says why 2 files are left out.$"):
        Library([tmp_path]).resolve("nobody", FOUR)


def test_two_entries_at_one_ratio_must_be_named(tmp_path: Path) -> None:
    write(tmp_path, GOOD)
    write(tmp_path, {**GOOD, "name": "other", "pattern": "FFSS"}, "other.yaml")
    with pytest.raises(LibraryError, match="several patterns at retention 1/2 fit: mine, other"):
        Library([tmp_path]).resolve("1/2", FOUR)


def test_the_users_own_folder_comes_first(tmp_path: Path) -> None:
    """A pattern that `search run` writes may bear the name and ratio of one that is shipped."""
    shipped, first, second = (tmp_path / name for name in ("shipped", "own", "other"))
    for folder in (shipped, first, second):
        folder.mkdir()
    write(shipped, GOOD)
    write(first, {**GOOD, "pattern": "FFSS"})
    write(second, {**GOOD, "name": "other", "pattern": "FSSF"})
    for value in ("mine", "1/2"):
        assert str(Library([shipped, first]).resolve(value, FOUR).pattern) == "FFSS"
    assert str(Library([shipped, second]).resolve("1/2", FOUR).pattern) == "FSSF"
    assert str(Library([shipped, second]).resolve("mine", FOUR).pattern) == GOOD["pattern"]


def test_another_models_pattern_is_named_as_such(library: Library) -> None:
    config = {"architectures": ["GlmMoeDsaForCausalLM"], "num_hidden_layers": 12, "index_topk": 64}
    with pytest.raises(PatternError, match=r"glm-5-1of4 is for GLM-5.*78 .*has 12.*patterns list"):
        library.resolve("glm-5-1of4", Checkpoint.from_config(config))


@pytest.mark.parametrize(
    ("value", "expected"),
    [("a.yaml", True), ("b.YML", True), ("../b", True), ("/etc/passwd", True), ("FSFS", False),
     ("1/4", False), ("uniform:1/4", False), ("uniform:x/4", False), ("full", False),
     ("glm-5-1of4", False), ("full < 32K <= 1/4", False), (" 1/4 ", False), (" a.yaml ", True)],
)  # fmt: skip
def test_what_names_a_file(value: str, expected: bool) -> None:
    assert names_a_file(value) is expected
