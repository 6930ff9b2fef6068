"""Every format read, paired and judged; everything that cannot be compared refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from sglang_indexcache.errors import QualityError
from sglang_indexcache.evaluate.logs import FORMATS, read_log
from sglang_indexcache.evaluate.logs.compare import compare_logs
from sglang_indexcache.evaluate.report import write_report
from sglang_indexcache.evaluate.verdict import Kind, verdicts_of
from sglang_indexcache.stats.pairs import paired
from tests.evaluate.logs.made import (
    COUNT,
    DATA,
    inspect_json,
    lm_eval,
    lm_eval_results,
    plain,
    ruler,
)


def same(number: int) -> float:
    return float(number % 5 != 0)


def worse(number: int) -> float:
    return float(number % 5 != 0 and number % 4 != 1)


def logs_of(kind: str, folder: Path) -> tuple[str, str]:
    """A run and a worse one of the same questions."""
    a, b = folder / "a", folder / "b"
    if kind == "lm-eval":
        return str(lm_eval(a, same).parent), str(lm_eval(b, worse))
    if kind == "plain":
        return str(plain(a, same)), str(plain(b, worse).parent)
    return str(DATA / "inspect-a.eval"), str(DATA / "inspect-b.eval")


@pytest.mark.parametrize("kind", FORMATS)
def test_each_format_is_read_paired_and_reported(kind: str, tmp_path: Path) -> None:
    first, second = logs_of(kind, tmp_path / "logs")
    full, quarter = read_log("full", first), read_log("quarter", second)
    assert full.kind == quarter.kind == kind
    record = compare_logs(full, quarter, margin=0.05)
    _, verdict = verdicts_of(record)["quarter"]
    a, b = ([s.value for s in log.samples if s.value is not None] for log in (full, quarter))
    pairs = paired(record.outcomes(), "quarter", "full")
    if len(pairs.names) == 1 and len(set(np.bincount(pairs.cells))) == 1:
        assert verdict.difference == pytest.approx(np.mean(b) - np.mean(a))
    assert verdict.difference is not None
    assert verdict.difference < 0
    said = write_report(record, tmp_path / "report")
    assert "Pattern not verified" in said
    assert "Not shown: that these questions can see a bad pattern" in said
    assert (tmp_path / "report" / "cells.png").exists()


@pytest.mark.parametrize("kind", FORMATS)
def test_a_run_compared_with_itself_loses_nothing(kind: str, tmp_path: Path) -> None:
    first, _ = logs_of(kind, tmp_path)
    record = compare_logs(read_log("a", first), read_log("b", first), margin=0.5)
    _, verdict = verdicts_of(record)["b"]
    assert verdict.difference == 0
    assert verdict.flips is not None
    assert (verdict.flips.lost, verdict.flips.won) == (0, 0)
    assert verdict.kind is not Kind.LOSS
    assert record.finished


@pytest.mark.parametrize(("kind", "questions"), [("lm-eval", 4), ("plain", 2), ("inspect", 2)])
def test_questions_about_one_text_are_one_context(
    kind: str, questions: int, tmp_path: Path
) -> None:
    first, second = logs_of(kind, tmp_path)
    record = compare_logs(read_log("a", first), read_log("b", second))
    pairs = paired(record.outcomes(), "b", "a")
    assert pairs.flips.pairs == questions * len(pairs)


def test_epochs_are_averaged() -> None:
    log = read_log("a", str(DATA / "inspect-a.eval"))
    assert len(log.samples) == 48
    record = compare_logs(log, read_log("b", str(DATA / "inspect-b.eval")))
    assert len(record.outcomes()) == 2 * 24
    assert {row.value for row in record.outcomes()} == {0.0, 0.5, 1.0}


def test_inspects_archive_and_its_json_say_the_same() -> None:
    archive = read_log("a", str(DATA / "inspect-a.eval"))
    text = read_log("a", str(DATA / "inspect-a.json"))
    assert sorted(archive.samples, key=str) == sorted(text.samples, key=str)


def test_rulers_metric_is_its_length(tmp_path: Path) -> None:
    log = read_log("a", str(ruler(tmp_path / "a", same)))
    assert {sample.length for sample in log.samples} == {4096, 8192}
    assert {sample.task for sample in log.samples} == {"niah_single_1"}
    record = compare_logs(log, read_log("b", str(ruler(tmp_path / "b", worse))))
    assert record.lengths == (4096, 8192)


def test_a_second_run_gives_the_noise_and_a_bad_one_the_proof(tmp_path: Path) -> None:
    def bad(number: int) -> float:
        return 0.0

    runs = {
        name: read_log(name, str(lm_eval(tmp_path / name, score)))
        for name, score in (("full", same), ("again", same), ("quarter", same), ("bad", bad))
    }
    record = compare_logs(
        runs["full"], runs["quarter"], again=runs["again"], bad=runs["bad"], margin=0.3
    )
    _, verdict = verdicts_of(record)["quarter"]
    assert verdict.noise is not None
    assert verdict.noise.pairs == COUNT
    assert "Not " not in verdict.sentence
    blunt = compare_logs(runs["full"], runs["quarter"], bad=runs["again"])
    assert verdicts_of(blunt)["quarter"][1].kind is Kind.CANNOT_SEE
    assert blunt.bad is not None
    assert blunt.bad.name == "again"


def test_a_reference_that_is_not_itself_is_refused(tmp_path: Path) -> None:
    runs = [
        read_log(name, str(lm_eval(tmp_path / name, score, count=400)))
        for name, score in (("full", same), ("quarter", same), ("again", lambda _: 0.0))
    ]
    record = compare_logs(runs[0], runs[1], again=runs[2])
    assert verdicts_of(record)["quarter"][1].kind is Kind.INVALID


def test_what_a_judge_could_not_score_is_no_wrong_answer(tmp_path: Path) -> None:
    places = plain(tmp_path / "a", lambda n: same(n) if n else None), plain(tmp_path / "b", same)
    a, b = (read_log(name, str(place)) for name, place in zip("ab", places, strict=True))
    with pytest.raises(QualityError, match="1 of 40 questions have no score"):
        compare_logs(a, b)
    assert a.samples[0].value is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"task": "other"}, "the tasks"),
        ({"count": COUNT - 1}, "1 questions are in only one"),
        ({"prompt": "another template"}, "another prompt"),
    ],
)
def test_unequal_runs_are_refused(changes: dict[str, object], reason: str, tmp_path: Path) -> None:
    a = read_log("a", str(lm_eval(tmp_path / "a", same)))
    b = read_log("b", str(lm_eval(tmp_path / "b", same, **changes)))
    with pytest.raises(QualityError, match=reason):
        compare_logs(a, b)


def test_runs_of_two_harnesses_are_refused(tmp_path: Path) -> None:
    a = read_log("a", str(lm_eval(tmp_path / "a", same)))
    with pytest.raises(QualityError, match="one harness"):
        compare_logs(a, read_log("b", str(DATA / "inspect-a.eval")))


def test_a_metric_must_be_chosen_where_there_are_several(tmp_path: Path) -> None:
    place = str(lm_eval(tmp_path, same, metrics=("acc", "acc_norm"), filter="strict"))
    with pytest.raises(QualityError, match=r"'acc,strict', 'acc_norm,strict': say which"):
        read_log("a", place)
    assert read_log("a", place, "acc,strict").samples[0].metric == "acc,strict"
    with pytest.raises(QualityError, match="no metric 'f1'"):
        read_log("a", place, "f1")


def test_a_score_that_is_no_share_is_refused(tmp_path: Path) -> None:
    with pytest.raises(QualityError, match="score of 37"):
        read_log("a", str(lm_eval(tmp_path, lambda _: 37.0)))


def test_several_runs_in_a_folder_are_refused(tmp_path: Path) -> None:
    path = lm_eval(tmp_path, same)
    (path.parent / path.name.replace("T10", "T11")).write_bytes(path.read_bytes())
    with pytest.raises(QualityError, match="several runs"):
        read_log("a", str(tmp_path))


def test_places_without_a_log_are_named(tmp_path: Path) -> None:
    with pytest.raises(QualityError, match="there is no log"):
        read_log("a", str(tmp_path / "nowhere"))
    (tmp_path / "other.jsonl").write_text(json.dumps({"a": 1}))
    with pytest.raises(QualityError, match="no per-sample log that is known"):
        read_log("a", str(tmp_path))


def test_a_torn_line_is_named(tmp_path: Path) -> None:
    path = lm_eval(tmp_path, same)
    path.write_text(path.read_text()[:-20])
    with pytest.raises(QualityError, match="line 40"):
        read_log("a", str(path))


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    path = lm_eval(tmp_path, same)
    path.write_bytes(path.read_bytes().rstrip() + b'\n{"doc_id": "\xff"}\n')
    with pytest.raises(QualityError, match="line 41 is not UTF-8"):
        read_log("a", str(path))


def test_the_difference_is_that_of_what_the_harness_printed(tmp_path: Path) -> None:
    """With clusters of unequal size, one of which is called 0."""
    groups = [16, 8, 4, 4, 2, 2, 1, 1, 1, 1]
    lost, won = (17, 25, 33, 34), (0, 1, 2, 3, 4, 5)
    before = read_log("all F", str(inspect_json(tmp_path / "a", lambda n: n not in won, groups)))
    after = read_log("1/4", str(inspect_json(tmp_path / "b", lambda n: n not in lost, groups)))
    record = compare_logs(before, after, margin=0.2)
    _, verdict = verdicts_of(record)["1/4"]
    assert len({row.context for row in record.outcomes()}) == len(groups)
    assert verdict.difference == pytest.approx(2 / 40)
    assert verdict.levels == pytest.approx((34 / 40, 36 / 40))
    assert "(all F 85.0%, 1/4 90.0%)" in verdict.headline
    assert "Difference +5.0 points" in verdict.details
    assert not any("not compared" in notice for notice in record.notices)


def test_samples_that_do_not_give_the_harness_own_number_are_refused(tmp_path: Path) -> None:
    path = lm_eval(tmp_path / "a", same)
    results = lm_eval_results(path, {"acc,none": 0.8, "acc_stderr,none": 0.01})
    log, other = read_log("a", str(path)), read_log("b", str(lm_eval(tmp_path / "b", worse)))
    record = compare_logs(log, other)
    assert any("not compared" in notice for notice in record.notices)  # of b nothing is known
    results.write_text(results.read_text().replace("0.8,", "0.83,"))
    said = r"a: the harness reports 0.8300 for longbench_qasper, .* have a mean of 0.8000"
    with pytest.raises(QualityError, match=said):
        compare_logs(read_log("a", str(path)), other)


def test_rulers_numbers_are_checked_by_length(tmp_path: Path) -> None:
    path = ruler(tmp_path / "a", lambda number: float(number % 4 > 0))
    lm_eval_results(path, {"4096,none": 0.6, "8192,none": 1.0})
    with pytest.raises(QualityError, match=r"reports 0\.6000 for niah_single_1"):
        compare_logs(read_log("a", str(path)), read_log("a", str(path)))
    lm_eval_results(path, {"4096,none": 0.5, "8192,none": 1.0, "16384,none": -1})
    compare_logs(read_log("a", str(path)), read_log("b", str(path)))


def test_runs_that_did_not_end_well_and_damaged_logs_are_refused(tmp_path: Path) -> None:
    cancelled = inspect_json(tmp_path / "a", same, [4] * 5, status="cancelled")
    with pytest.raises(QualityError, match=r"did not end well \(status cancelled\)"):
        read_log("a", str(cancelled))
    damaged = inspect_json(tmp_path / "b", same, [4] * 5, samples=[{"scores": {"match": {}}}])
    with pytest.raises(QualityError, match="is damaged, or no log of Inspect"):
        read_log("a", str(damaged))
    archive = bytearray((DATA / "inspect-a.eval").read_bytes())
    start = archive.index(b"samples/") + 200
    archive[start : start + 40] = bytes(40)
    broken = tmp_path / "c.eval"
    broken.write_bytes(archive)
    with pytest.raises(QualityError, match=r"damaged|not a whole"):
        read_log("a", str(broken))


@pytest.mark.parametrize(
    ("value", "said"),
    [([1.0, 2.0], "a score that is no number"), (None, "names the metric 'acc' and document 3")],
)
def test_metrics_of_whole_runs_and_missing_ones_are_refused(
    tmp_path: Path, value: object, said: str
) -> None:
    path = lm_eval(tmp_path, same)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    if value is None:
        del rows[3]["acc"]
    else:
        rows[3]["acc"] = value
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with pytest.raises(QualityError, match=said):
        read_log("a", str(path))
