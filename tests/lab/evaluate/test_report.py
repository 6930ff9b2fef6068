"""The report of a made-up evaluation: the same bytes, numbers against an independent count."""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from sglang_indexcache.lab.evaluate.evaluation import NAME, load
from sglang_indexcache.lab.evaluate.report import (
    NOISE,
    ONE_LOOK,
    cell_differences,
    control,
    provenance,
    write_report,
)
from sglang_indexcache.lab.evaluate.verdict import verdicts_of
from sglang_indexcache.lab.stats.pairs import Answer
from tests.lab.evaluate.evaluations import LENGTHS, SHORT, TASKS, evaluation

ROOT = Path(__file__).parents[3]
FILES = {"report.html", "eval.json"}


def test_the_same_record_gives_the_same_bytes(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        write_report(evaluation(12), folder)
    assert {path.name for path in first.iterdir()} == FILES
    for name in FILES:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


@pytest.mark.parametrize(
    "folder",
    ["quality/tiny-dsa", *(f"smollm2/verdicts/{length}" for length in ("2Ki", "4Ki", "8Ki"))],
)
def test_the_published_report_is_what_its_journal_gives(folder: str, tmp_path: Path) -> None:
    """It was an old version's, with a picture that nothing draws any more."""
    published = ROOT / "benchmarks/results" / folder
    journal = gzip.decompress((published / f"{NAME}.gz").read_bytes())
    (tmp_path / NAME).write_bytes(journal)
    write_report(load(tmp_path), tmp_path)
    assert (tmp_path / "report.html").read_text() == (published / "report.html").read_text()

    def near(digits: str) -> object:
        """Stand in for a published number: another processor's libm moves the last digit."""
        return pytest.approx(float(digits), rel=1e-9, abs=1e-12)

    text = (published / "eval.json").read_text()
    assert json.loads((tmp_path / "eval.json").read_text()) == json.loads(text, parse_float=near)


def test_the_page_starts_with_the_sentence_and_needs_no_other_file(tmp_path: Path) -> None:
    sentence = write_report(evaluation(12), tmp_path)
    page = (tmp_path / "report.html").read_text()

    class Reader(HTMLParser):
        text = ""
        sources: tuple[str, ...] = ()

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            names = dict(attrs)
            self.sources += tuple(names[k] or "" for k in ("src", "href") if k in names)

        def handle_data(self, data: str) -> None:
            self.text += data

    reader = Reader()
    reader.feed(page[page.index("<body>") :])
    first, second, provenance = sentence.split("\n")
    text = re.sub(r"\s+", " ", reader.text)
    assert text.strip().startswith("Do long-context answers of some-model stay right under half")
    for _, verdict in verdicts_of(evaluation(12)).values():
        assert f"{verdict.headline}{verdict.details}" in text
        assert verdict.sentence in (first, second)
    assert text.count(provenance) == 1
    assert reader.sources == ()


def test_the_sentence_names_all_that_a_reader_needs(tmp_path: Path) -> None:
    text = write_report(evaluation(30), tmp_path)
    for part in (
        "half: ", "in 120 contexts", "margin 2 points", "lengths 32Ki, 128Ki", "0123456789ab",
        "commit abcdef123456", "flags --task needles --margin 0.02", "2026-11-22", "A/A: ",
        "Endpoint: right to the letter",
    ):  # fmt: skip
        assert part in text
    mixed = evaluation(4)
    rows = tuple(replace(each, task="passages") for each in mixed.planned)
    for planned, endpoint in (
        (rows, "Endpoint: share of tokens right in passages, teacher-forced."),
        (mixed.planned + rows, "to the letter, share of tokens right in passages, teacher-forced."),
    ):
        assert provenance(replace(mixed, planned=planned)).endswith(endpoint)


def test_numbers_are_those_of_an_independent_count() -> None:
    record = evaluation(20)
    place = (TASKS[0], LENGTHS[0])
    rows = [row for row in record.answers if (row.task, row.length) == place]
    base = {(r.context, r.question): r for r in rows if (r.arm, r.repeat) == ("full", 0)}
    mine = [row for row in rows if row.arm == "quarter"]
    [cell] = [
        difference
        for difference in cell_differences(record)
        if (difference.arm, difference.task, difference.length) == ("quarter", *place)
    ]
    assert cell.level == pytest.approx(np.mean([row.right for row in mine]))
    assert cell.reference == pytest.approx(np.mean([row.right for row in base.values()]))
    assert cell.mean == pytest.approx(cell.level - cell.reference)
    lost = sum(bool(base[r.context, r.question].right) and not r.right for r in mine)
    assert (cell.flips.lost, cell.flips.pairs, cell.contexts) == (lost, len(mine), 20)


def test_control_and_noise_stand_apart() -> None:
    record = evaluation(20)
    cells = cell_differences(record)
    assert set(control(record)) == {"half", "quarter", "uniform:1/4", "full again"}
    assert all((flips.lost, flips.won) == (0, 0) for flips in control(record).values())
    assert SHORT not in {cell.length for cell in cells}
    noise = {(cell.task, cell.length) for cell in cells if cell.arm == NOISE}
    assert noise == {(task, length) for task in TASKS for length in LENGTHS}


def test_cells_at_their_limits_are_named_with_the_reason(tmp_path: Path) -> None:
    record = evaluation(12)
    easy, hard = (TASKS[0], LENGTHS[0]), (TASKS[1], LENGTHS[1])

    def right(row: Answer) -> float:
        return {easy: 1.0, hard: 0.0}.get((row.task, row.length), row.right)

    changed = replace(
        record, answers=tuple(replace(row, right=right(row)) for row in record.answers)
    )
    blind = {
        (cell.task, cell.length): cell.blind for cell in cell_differences(changed) if cell.blind
    }
    assert blind.keys() == {easy, hard}
    assert blind[easy] == "too easy: even uniform:1/4 gets 100% right there"
    assert "hardly more than guessing" in blind[hard]
    write_report(changed, tmp_path)
    for reason in blind.values():
        assert reason in (tmp_path / "report.html").read_text()


def test_secondary_intervals_are_of_one_look_and_hold_their_mean() -> None:
    from scipy.stats import norm

    assert pytest.approx(norm.ppf(0.95)) == ONE_LOOK
    for row in cell_differences(evaluation(20)):
        assert row.low <= row.mean <= row.high


def test_before_the_first_look_it_says_so(tmp_path: Path) -> None:
    complete = evaluation(12)
    few = {row.context for row in complete.planned[:2]}
    partial = replace(
        complete,
        answers=tuple(row for row in complete.answers if row.context in few),
        finished=False,
    )
    assert write_report(partial, tmp_path).startswith("No verdict yet")
    assert "Not finished" in (tmp_path / "report.html").read_text()


def test_what_the_record_says_is_escaped(tmp_path: Path) -> None:
    write_report(evaluation(12, notices=("<script>alert(1)</script>",)), tmp_path)
    assert "<script>" not in (tmp_path / "report.html").read_text()
