"""An evaluation as Inspect's logs: our own reader of that format finds the same in them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_indexcache.errors import QualityError
from sglang_indexcache.evaluate.logs import read_log
from sglang_indexcache.evaluate.logs.compare import compare_logs
from sglang_indexcache.evaluate.logs.to_inspect import write_inspect
from sglang_indexcache.stats.pairs import paired
from tests.evaluate.evaluations import evaluation

RECORD = evaluation(12)


def test_every_arm_is_read_back_question_by_question(tmp_path: Path) -> None:
    paths = write_inspect(RECORD, tmp_path)
    turns = [("full", 0), ("full", 1), ("half", 0), ("quarter", 0), ("uniform:1/4", 0)]
    assert len(paths) == len(turns)
    for path, (arm, repeat) in zip(paths, turns, strict=True):
        for metric in ("right", "agreement"):
            log = read_log(arm, str(path), metric)
            assert log.kind == "inspect"
            assert [(one.question, one.value) for one in log.samples] == [
                (f"{row.context} {row.question}", float(getattr(row, metric)))
                for row in RECORD.answers
                if (row.arm, row.repeat) == (arm, repeat) and row.length > RECORD.selects_all
            ]


def test_comparing_the_logs_finds_what_the_evaluation_did(tmp_path: Path) -> None:
    full, _, _, quarter, _ = write_inspect(RECORD, tmp_path)
    _, verdicts = compare_logs(
        read_log("all-F", str(full), "right"), read_log("1of4", str(quarter), "right"), margin=0.02
    )
    _, verdict = verdicts["1of4"]
    long = [row for row in RECORD.outcomes() if row.length > RECORD.selects_all]
    own = paired(long, "quarter", "full")
    assert verdict.flips == own.flips
    assert verdict.difference == pytest.approx(own.values.mean())


def test_contexts_made_of_something_else_are_not_paired(tmp_path: Path) -> None:
    other = evaluation(12, facts={**RECORD.facts, "material": "0000000000000000-4"})
    old = evaluation(12, facts={**RECORD.facts, "material": "", "started": "2026-11-21T10:00:00Z"})
    logs = [
        read_log(name, str(write_inspect(record, tmp_path / name)[0]), "right")
        for name, record in (("one", RECORD), ("two", other), ("old", old))
    ]
    for log in logs[1:]:
        with pytest.raises(QualityError, match="have another prompt or another right answer"):
            compare_logs(logs[0], log, margin=0.02)


def test_the_header_says_which_pattern_and_how_it_did(tmp_path: Path) -> None:
    path = write_inspect(RECORD, tmp_path)[3]
    log = json.loads(path.read_text())
    assert log["eval"]["metadata"]["pattern"] == "FSSS"
    assert (log["status"], log["eval"]["model"]) == ("success", "some-model")
    means = {score["name"]: score["metrics"]["mean"]["value"] for score in log["results"]["scores"]}
    right = [sample["scores"]["right"]["value"] == "C" for sample in log["samples"]]
    assert means["right"] == pytest.approx(sum(right) / len(right))
    assert set(means) == {"right", "nll", "kl", "agreement"}


def test_the_same_record_gives_the_same_bytes(tmp_path: Path) -> None:
    first, second = (write_inspect(RECORD, tmp_path / name) for name in ("first", "second"))
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
