"""A verdict on its way into a pattern file, and what is said of it from there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from sglang_indexcache.errors import LibraryError, QualityError
from sglang_indexcache.lab.evaluate.pattern_file import add_evaluated, write_quality
from sglang_indexcache.lab.evaluate.verdict import verdicts_of
from sglang_indexcache.library.files import NOT_EVALUATED, Evaluated, load_entry
from sglang_indexcache.library.writing import shipped
from tests.lab.evaluate.evaluations import FACTS, LENGTHS, evaluation

DIGEST = FACTS["checkpoint"]


def pattern_file(folder: Path, pattern: str = "FSFS", tail: str = "") -> Path:
    path = folder / "mine.yaml"
    full = pattern.count("F")
    path.write_text(
        "name: mine  # a comment\n"
        "model: {name: M, architectures: [A], num_layers: 4}\n"
        f"pattern: {pattern}\nfull_layers: {full}\nretention: {full}/4\n"
        f"method: {{name: greedy}}\nsource: {{title: T}}\n{tail}"
    )
    return path


def row(**changes: object) -> Evaluated:
    fields = {
        "verdict": "no loss", "margin": 0.01, "difference": -0.001, "interval": (-0.004, 0.002),
        "contexts": 1536, "pairs": 12288, "tasks": ("needles",), "lengths": (32768, 131072),
        "checkpoint": DIGEST, "commit": "abc", "date": "2026-11-22",
    }  # fmt: skip
    return Evaluated(**(fields | changes))


def test_the_verdict_is_written_and_read_back(tmp_path: Path) -> None:
    path = pattern_file(tmp_path)
    sentence = write_quality(path, evaluation(60))
    assert sentence == "no loss beyond 2 points in contexts of up to 128Ki tokens"
    entry = load_entry(path)
    [row_read] = entry.evaluated
    assert (row_read.contexts, row_read.pairs, row_read.lengths) == (240, 960, LENGTHS)
    assert (row_read.commit, row_read.date) == ("abcdef123456", "2026-11-22")
    assert "# a comment" in path.read_text()
    assert entry.known(lambda: DIGEST) == f"measured here: {sentence}"
    assert entry.known(lambda: "f" * 64) == NOT_EVALUATED


def test_counts_are_those_of_the_look_that_decided(tmp_path: Path) -> None:
    path = pattern_file(tmp_path, "FSSS")
    record = evaluation(60)
    look, verdict = verdicts_of(record)["quarter"]
    assert look < 4
    write_quality(path, record)
    [row_read] = load_entry(path).evaluated
    assert row_read.verdict == "loss"
    assert row_read.contexts == 60 * look
    assert verdict.flips is not None
    assert row_read.pairs == verdict.flips.pairs


def test_the_last_verdict_on_a_checkpoint_counts(tmp_path: Path) -> None:
    path = pattern_file(tmp_path)
    add_evaluated(path, row(verdict="undecided"))
    add_evaluated(path, row())
    assert (
        load_entry(path)
        .known(lambda: DIGEST)
        .endswith("no loss beyond 1 point in contexts of up to 128Ki tokens")
    )


def test_no_digest_is_made_for_an_entry_that_was_never_evaluated(tmp_path: Path) -> None:
    def slow() -> str:
        raise AssertionError("read hundreds of gigabytes for nothing")

    assert load_entry(pattern_file(tmp_path)).known(slow) == NOT_EVALUATED


@pytest.mark.parametrize("path", sorted(shipped("patterns").glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_files_keep_every_other_line(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / path.name
    copy.write_bytes(path.read_bytes())
    before = load_entry(copy)
    add_evaluated(copy, row())
    lines = path.read_text().splitlines()
    after = copy.read_text().splitlines()
    assert [line for line in after if line in lines] == lines
    added = [line for line in after if line not in lines]
    assert len([line for line in added if "verdict: no loss" in line]) == 1
    assert set(added[:-1]) <= {"quality:"}
    assert load_entry(copy).quality == (*before.quality, row())


@pytest.mark.parametrize(
    "tail",
    [
        "quality:\n- {benchmark: b, score: 1.0}\n",
        "quality:\n- benchmark: b\n  score: 1.0\nlatency: []\n",
        "quality:  # cited\n  # lines\n  - {benchmark: b, score: 1}\n  - {benchmark: c, score: 2}",
    ],
)
def test_a_verdict_joins_the_list_however_it_is_written(tail: str, tmp_path: Path) -> None:
    path = pattern_file(tmp_path, tail=tail)
    before = load_entry(path)
    add_evaluated(path, row())
    assert load_entry(path).quality == (*before.quality, row())
    assert yaml.safe_load(path.read_text())["name"] == "mine"


def test_a_file_without_a_place_is_left_as_it_is(tmp_path: Path) -> None:
    path = pattern_file(tmp_path, tail="quality: [{benchmark: b, score: 1.0}]\n")
    text = path.read_text()
    with pytest.raises(LibraryError, match="no place for a verdict"):
        add_evaluated(path, row())
    assert path.read_text() == text


def test_what_cannot_be_written_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(QualityError, match=r"another pattern than those evaluated \(half, quarter"):
        write_quality(pattern_file(tmp_path, "FFSS"), evaluation(4))
    unfinished = replace(evaluation(4), answers=(), finished=False)
    with pytest.raises(QualityError, match="first look"):
        write_quality(pattern_file(tmp_path), unfinished)


def test_places_that_could_not_see_stay_named(tmp_path: Path) -> None:
    written_row = row(blind=("needles at 131072",))
    assert (
        str(written_row)
        == "no loss beyond 1 point in contexts of up to 128Ki tokens, without needles at 131072"
    )
    small = row(verdict="small loss", difference=-0.004)
    assert str(small) == (
        "it loses 0.4 points of right answers, less than the margin of 1, in contexts of up to "
        "128Ki tokens"
    )
    add_evaluated(pattern_file(tmp_path), written_row)
    [again] = load_entry(tmp_path / "mine.yaml").evaluated
    assert again == written_row
