"""Every kind of log read, paired and judged; everything that cannot be compared refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_indexcache.errors import QualityError
from sglang_indexcache.lab.evaluate.compare import compare_logs
from sglang_indexcache.lab.evaluate.logs import (
    KINDS,
    LM_EVAL,
    PLAIN,
    Log,
    read_log,
)
from sglang_indexcache.lab.evaluate.report import write_report
from sglang_indexcache.lab.evaluate.verdict import Kind, verdicts_of
from sglang_indexcache.lab.stats.pairs import paired
from tests.lab.evaluate.harness_logs import (
    COUNT,
    lines,
    lm_eval,
    plain,
    ruler,
)


def right(number: int) -> float:
    return float(number % 5 != 0)


def worse(number: int) -> float:
    return float(number % 5 != 0 and number % 4 != 1)


WRITERS = {LM_EVAL: lm_eval, PLAIN: plain}


def two_logs(kind: str, folder: Path) -> tuple[Log, Log]:
    """Return a run by its folder, and a worse one of the same questions by its file."""
    write = WRITERS[kind]
    first, second = write(folder / "a", right), write(folder / "b", worse)
    return read_log("full", str(first.parent)), read_log("quarter", str(second))


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_read_paired_and_reported(kind: str, tmp_path: Path) -> None:
    full, quarter = two_logs(kind, tmp_path)
    assert full.kind == quarter.kind == kind
    record = compare_logs(full, quarter, margin=0.05)
    _, verdict = verdicts_of(record)["quarter"]
    lost = sum(right(number) - worse(number) for number in range(COUNT))
    assert verdict.difference == pytest.approx(-lost / COUNT)
    pairs = paired(record.answers, "quarter", "full")
    assert len(pairs) == len({sample.context for sample in full.samples}) < COUNT
    assert pairs.flips.pairs == COUNT
    report = write_report(record, tmp_path / "report")
    assert "Pattern not verified" in report
    assert "Not shown: that these questions can see a bad pattern" in report


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_compared_with_itself_loses_nothing(kind: str, tmp_path: Path) -> None:
    full, _ = two_logs(kind, tmp_path)
    record = compare_logs(full, Log("b", full.kind, full.samples), margin=0.5)
    _, verdict = verdicts_of(record)["b"]
    assert verdict.difference == 0
    assert verdict.flips is not None
    assert (verdict.flips.lost, verdict.flips.won) == (0, 0)
    assert verdict.kind is not Kind.LOSS
    assert record.finished


def test_says_that_a_question_counts_as_a_text_where_the_log_names_none(tmp_path: Path) -> None:
    log = read_log("a", str(plain(tmp_path / "a", right)))
    alone = tuple(replace(sample, context=sample.question) for sample in log.samples)
    notice_text = "Each question counts as a text of its own, because the log names none"
    for samples, expected in ((log.samples, False), (alone, True)):
        logs = (Log(name, log.kind, samples) for name in ("full", "quarter"))
        record = compare_logs(*logs)
        assert any(notice_text in notice for notice in record.notices) is expected


def test_epochs_are_averaged(tmp_path: Path) -> None:
    path = plain(tmp_path, right)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    again = [row | {"score": 1 - row["score"] * (row["id"] % 2)} for row in rows]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows + again))
    log = read_log("a", str(path))
    assert len(log.samples) == 2 * COUNT
    record = compare_logs(log, Log("b", log.kind, log.samples))
    assert len(record.answers) == 2 * COUNT
    assert {row.right for row in record.answers} == {0.5, 1.0}


def test_rulers_metric_is_its_length(tmp_path: Path) -> None:
    log = read_log("a", str(ruler(tmp_path / "a", right)))
    assert {sample.length for sample in log.samples} == {4096, 8192}
    assert {sample.task for sample in log.samples} == {"niah_single_1"}
    record = compare_logs(log, read_log("b", str(ruler(tmp_path / "b", worse))))
    assert record.lengths == (4096, 8192)


def test_a_second_run_gives_the_noise_and_a_bad_one_the_proof(tmp_path: Path) -> None:
    def bad(number: int) -> float:
        return 0.0

    runs = {
        name: read_log(name, str(lm_eval(tmp_path / name, score)))
        for name, score in (("full", right), ("again", right), ("quarter", right), ("bad", bad))
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
        for name, score in (("full", right), ("quarter", right), ("again", lambda _: 0.0))
    ]
    record = compare_logs(runs[0], runs[1], again=runs[2])
    assert verdicts_of(record)["quarter"][1].kind is Kind.INVALID


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"task": "other"}, "the tasks"),
        ({"count": COUNT - 1}, "1 questions are in only one"),
        ({"prompt": "another template"}, "another prompt"),
    ],
)
def test_unequal_runs_are_refused(changes: dict[str, object], reason: str, tmp_path: Path) -> None:
    a = read_log("a", str(lm_eval(tmp_path / "a", right)))
    b = read_log("b", str(lm_eval(tmp_path / "b", right, **changes)))
    with pytest.raises(QualityError, match=reason):
        compare_logs(a, b)


def test_runs_of_two_harnesses_are_refused(tmp_path: Path) -> None:
    a, b = (write(tmp_path / write.__name__, right) for write in (lm_eval, plain))
    with pytest.raises(QualityError, match="one harness"):
        compare_logs(read_log("a", str(a)), read_log("b", str(b)))


def test_a_metric_must_be_chosen_where_there_are_several(tmp_path: Path) -> None:
    place = str(lm_eval(tmp_path, right, metrics=("acc", "acc_norm"), filter="strict"))
    with pytest.raises(QualityError, match=r"'acc,strict', 'acc_norm,strict': say which"):
        read_log("a", place)
    assert read_log("a", place, "acc,strict").samples[0].metric == "acc,strict"
    with pytest.raises(QualityError, match="no metric 'f1'"):
        read_log("a", place, "f1")


def test_several_runs_in_a_folder_are_refused(tmp_path: Path) -> None:
    path = lm_eval(tmp_path, right)
    (path.parent / path.name.replace("T10", "T11")).write_bytes(path.read_bytes())
    with pytest.raises(QualityError, match="several runs"):
        read_log("a", str(tmp_path))


@pytest.mark.parametrize("twice", ["candidate", "bad"])
def test_runs_of_one_name_are_refused(tmp_path: Path, twice: str) -> None:
    """One would take the place of the other, and be compared with itself."""
    names = {"reference": "glm5", "candidate": "1of4", "bad": "uniform"} | {twice: "glm5"}
    logs = {
        role: read_log(name, str(lm_eval(tmp_path / role, lambda n, role=role: len(role) + n > 20)))
        for role, name in names.items()
    }
    with pytest.raises(QualityError, match="two of the runs are called glm5"):
        compare_logs(logs["reference"], logs["candidate"], bad=logs["bad"], margin=0.05)


def test_places_without_a_log_are_named(tmp_path: Path) -> None:
    with pytest.raises(QualityError, match="there is no log"):
        read_log("a", str(tmp_path / "nowhere"))
    (tmp_path / "other.jsonl").write_text(json.dumps({"a": 1}))
    with pytest.raises(QualityError, match="no per-sample log that is known"):
        read_log("a", str(tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"id": 0, "sco', "line 1 is not JSON: .* delete that line in both logs"),
        (b"3\n", "line 1 is no sample"),
    ],
)
def test_what_is_wrong_with_a_named_file_is_said(
    tmp_path: Path, content: bytes, message: str
) -> None:
    """All was once "no per-sample log that is known"."""
    path = tmp_path / "scores.jsonl"
    path.write_bytes(content)
    for place in (path, tmp_path):
        with pytest.raises(QualityError, match=message):
            read_log("a", str(place))


def test_a_damaged_file_beside_a_log_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{")
    plain(tmp_path, right)
    assert len(read_log("a", str(tmp_path)).samples) == COUNT


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_another_kind_is_named(kind: str, tmp_path: Path) -> None:
    path = WRITERS[kind](tmp_path, right)
    with path.open("a") as file:
        file.write('{"note": 1}\n')
    with pytest.raises(QualityError, match=rf"line {COUNT + 1} has no "):
        read_log("a", str(path))


def test_a_table_writes_numbers_as_text(tmp_path: Path) -> None:
    path = tmp_path / "scores.csv"
    rows = "id,score\na,1.0\nb, 0.5\nc,True\nd,false\n"
    path.write_text(rows)
    values = [sample.value for sample in read_log("a", str(path)).samples]
    assert values == [1.0, 0.5, 1.0, 0.0]
    for unscored in ("", "nan", "right"):
        path.write_text(f"{rows}e,{unscored}\n")
        with pytest.raises(QualityError, match=r"no score for question e, .*out of all logs"):
            read_log("a", str(path))


@pytest.mark.parametrize(
    ("value", "advice"), [(100.0, True), (37.5, True), (101, False), (-1, False)]
)
def test_scores_in_per_cent_are_to_be_divided(tmp_path: Path, value: float, advice: bool) -> None:
    path = plain(tmp_path, lambda n: value if n else 0.0)
    with pytest.raises(QualityError, match=f"score of {value:g}") as error:
        read_log("a", str(path))
    assert ("divide by 100 in all logs" in str(error.value)) is advice


@pytest.mark.parametrize("lacking", [{"metrics", "filter"}, {"metrics", "filter", "doc_hash"}])
def test_an_older_lm_eval_is_named(tmp_path: Path, lacking: set[str]) -> None:
    path = lm_eval(tmp_path, right)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    lines(path, [{k: v for k, v in row.items() if k not in lacking} for row in rows])
    for place in (path, tmp_path):
        with pytest.raises(QualityError, match=r"an lm-eval before 0\.4\.7, .* 0\.4\.7 or later"):
            read_log("a", str(place))


def test_the_difference_is_that_of_what_the_harness_printed(tmp_path: Path) -> None:
    """The clusters have unequal sizes, and one of them is called 0."""
    groups = [16, 8, 4, 4, 2, 2, 1, 1, 1, 1]
    lost, won = (17, 25, 33, 34), (0, 1, 2, 3, 4, 5)
    runs = []
    for name, wrong in (("all F", won), ("1/4", lost)):
        path = lm_eval(tmp_path / name, lambda n, wrong=wrong: n not in wrong, groups=groups)
        runs.append(read_log(name, str(path)))
    record = compare_logs(*runs, margin=0.2)
    _, verdict = verdicts_of(record)["1/4"]
    assert len({row.context for row in record.answers}) == len(groups)
    assert verdict.difference == pytest.approx(2 / 40)
    assert verdict.levels == pytest.approx((34 / 40, 36 / 40))
    assert "(all F 85.0%, 1/4 90.0%)" in verdict.headline
    assert "Difference +5.0 points" in verdict.details


@pytest.mark.parametrize("zero", [0, ""])
def test_a_context_may_be_called_anything(tmp_path: Path, zero: object) -> None:
    rows = [{"id": n, "context": zero if n < 4 else 1, "score": 1} for n in range(8)]
    path = tmp_path / "scores.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert len({sample.context for sample in read_log("a", str(path)).samples}) == 2


@pytest.mark.parametrize(
    ("value", "said"),
    [([1.0, 2.0], "a score that is no number"), (None, "names the metric 'acc' and document 3")],
)
def test_metrics_of_whole_runs_and_missing_ones_are_refused(
    tmp_path: Path, value: object, said: str
) -> None:
    path = lm_eval(tmp_path, right)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    if value is None:
        del rows[3]["acc"]
    else:
        rows[3]["acc"] = value
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with pytest.raises(QualityError, match=said):
        read_log("a", str(path))
