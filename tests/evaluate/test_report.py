"""The report of a made-up evaluation: the same bytes, numbers against an independent count."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from sglang_indexcache.evaluate.evaluation import Answer, Mode
from sglang_indexcache.evaluate.report import write_report
from sglang_indexcache.evaluate.summary import NOISE, ONE_LOOK, headlines, summarise
from sglang_indexcache.evaluate.verdict import Kind
from tests.evaluate.evaluations import LENGTHS, SHORT, TASKS, evaluation

FILES = {
    "report.html", "eval.json", "samples.jsonl",
    "forest.png", "length.png", "flips.png", "depth.png", "looks.png",
}  # fmt: skip


def test_the_same_record_gives_the_same_bytes(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        write_report(evaluation(12), folder)
    assert {path.name for path in first.iterdir()} == FILES
    for name in FILES:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


def test_the_page_starts_with_the_sentence_and_needs_no_other_file(tmp_path: Path) -> None:
    said = write_report(evaluation(12), tmp_path)
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
    first, second = said.split("\n")
    assert reader.text.strip().startswith(first)
    assert second in reader.text
    assert len(reader.sources) == 5
    assert all(source.startswith("data:image/png;base64,") for source in reader.sources)


def test_the_sentence_names_all_that_a_reader_needs() -> None:
    record = evaluation(30)
    first = headlines(record, summarise(record))[0]
    for part in (
        "half: ", "in 120 contexts", "margin 2 points", "lengths 32Ki, 128Ki", "0123456789ab",
        "commit abcdef123456", "flags --task needles --margin 0.02", "2026-11-22", "A/A: ",
    ):  # fmt: skip
        assert part in first


def test_numbers_are_those_of_an_independent_count() -> None:
    record = evaluation(20)
    summary = summarise(record)
    rows = [row for row in record.answers if row.length == LENGTHS[0]]
    base = {(r.context, r.question): r for r in rows if (r.arm, r.repeat) == ("full", 0)}
    mine = [row for row in rows if row.arm == "quarter"]
    added = [row.nll - base[row.context, row.question].nll for row in mine]
    [nll] = [d for d in summary.nll if (d.arm, d.length) == ("quarter", LENGTHS[0])]
    assert nll.mean == pytest.approx(np.mean(added))
    [level] = [x for x in summary.rights if (x.arm, x.length) == ("quarter", LENGTHS[0])]
    assert level.mean == pytest.approx(np.mean([row.right for row in mine]))
    [kl] = [x for x in summary.kl if (x.arm, x.length) == ("quarter", LENGTHS[0])]
    assert kl.mean == pytest.approx(np.mean([row.kl for row in mine]))
    deep = [
        row.nll - base[row.context, row.question].nll for row in mine if 0.5 <= row.depth < 0.75
    ]
    [spot] = [s for s in summary.spots if (s.arm, s.length, s.depth) == ("quarter", LENGTHS[0], 2)]
    assert spot.mean == pytest.approx(np.mean(deep))
    lost = sum(bool(base[r.context, r.question].right) and not r.right for r in mine)
    [length] = [d for d in summary.lengths if (d.arm, d.length) == ("quarter", LENGTHS[0])]
    assert (length.flips.lost, length.flips.pairs) == (lost, len(mine))


def test_control_and_noise_stand_apart() -> None:
    summary = summarise(evaluation(20))
    assert {row.length for row in summary.control} == {SHORT}
    assert all((row.flips.lost, row.flips.won) == (0, 0) for row in summary.control)
    assert SHORT not in {row.length for row in (*summary.cells, *summary.rights, *summary.nll)}
    assert NOISE not in {level.arm for level in summary.rights}  # of other contexts than the arms
    noise = {(row.task, row.length) for row in summary.cells if row.arm == NOISE}
    assert noise == {(task, length) for task in TASKS for length in LENGTHS}


def test_a_claim_stands_where_its_line_reaches_the_boundary() -> None:
    record = evaluation(60)
    summary = summarise(record)
    bounds = record.design.bounds
    for name, (look, verdict) in summary.verdicts.items():
        [step] = [step for step in summary.steps if (step.arm, step.look) == (name, look)]
        assert (step.no_loss >= bounds[look - 1]) == (verdict.kind is Kind.NO_LOSS)
        assert (step.loss >= bounds[look - 1]) == (verdict.kind is Kind.LOSS)
    assert {verdict.kind for _, verdict in summary.verdicts.values()} == {Kind.NO_LOSS, Kind.LOSS}


def test_nothing_is_drawn_behind_the_look_that_decided() -> None:
    record = evaluation(60)
    summary = summarise(record)
    decided = {name: look for name, (look, _) in summary.verdicts.items()}
    assert min(decided.values()) < record.look  # asked on for the other pattern
    for name, look in decided.items():
        steps = [step.look for step in summary.steps if step.arm == name]
        assert steps == list(range(1, look + 1))


def test_cells_at_their_limits_are_named_with_the_reason(tmp_path: Path) -> None:
    record = evaluation(12)
    easy, hard = (TASKS[0], LENGTHS[0]), (TASKS[1], LENGTHS[1])

    def right(row: Answer) -> bool | None:
        place = (row.task, row.length)
        return {easy: row.arm != "uniform:1/4", hard: False}.get(place, row.right)

    changed = replace(
        record, answers=tuple(replace(row, right=right(row)) for row in record.answers)
    )
    limits = {(limit.task, limit.length): limit for limit in summarise(changed).limits}
    assert limits.keys() == {easy, hard}
    assert not limits[easy].blind
    assert limits[easy].reason == "full gets 100% right there: no gain can show"
    assert limits[hard].blind
    assert "hardly more than guessing" in limits[hard].reason
    write_report(changed, tmp_path)
    for reason in (limit.reason for limit in limits.values()):
        assert reason in (tmp_path / "report.html").read_text()


def test_secondary_intervals_are_of_one_look_and_hold_their_mean() -> None:
    from scipy.stats import norm

    assert pytest.approx(norm.ppf(0.95)) == ONE_LOOK
    for row in summarise(evaluation(20)).cells:
        assert row.low <= row.mean <= row.high


def test_generated_answers_have_no_nats_and_depth_shows_points(tmp_path: Path) -> None:
    record = evaluation(12, nats=False)
    assert record.mode is Mode.GENERATE
    summary = summarise(record)
    assert not summary.nll
    assert not summary.kl
    assert not summary.spots_are_nats
    write_report(record, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == FILES


def test_before_the_first_look_it_says_so_and_old_pictures_go(tmp_path: Path) -> None:
    (tmp_path / "looks.png").write_bytes(b"of another evaluation")
    whole = evaluation(12)
    few = {row.context for row in whole.planned[:6]}
    begun = replace(
        whole,
        answers=tuple(row for row in whole.answers if row.context in few),
        finished=False,
    )
    assert write_report(begun, tmp_path).startswith("No verdict yet")
    assert "Not finished" in (tmp_path / "report.html").read_text()
    assert not (tmp_path / "looks.png").exists()


def test_what_is_missing_is_counted_and_left_out_of_every_arm(tmp_path: Path) -> None:
    record = evaluation(12, missing=3)
    write_report(record, tmp_path)
    assert "48 planned, 3 missing" in re.sub(r"\s+", " ", (tmp_path / "report.html").read_text())
    data = json.loads((tmp_path / "eval.json").read_text())
    assert len(data["missing"]) == 3
    assert (
        sum(row["contexts"] for row in data["secondary"]["lengths"] if row["arm"] == "half") == 45
    )


def test_the_samples_are_the_answers(tmp_path: Path) -> None:
    record = evaluation(12)
    write_report(record, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert len(lines) == len(record.answers)
    assert lines[0]["arm"] == "full"


def test_what_the_record_says_is_escaped(tmp_path: Path) -> None:
    write_report(evaluation(12, notices=("<script>alert(1)</script>",)), tmp_path)
    assert "<script>" not in (tmp_path / "report.html").read_text()
