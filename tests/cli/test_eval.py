"""``indexcache eval report`` and ``compare``, without a server."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from sglang_indexcache.cli import app
from tests.quality.evaluate import evaluate
from tests.quality.fake_server import Fake, serving
from tests.quality.logs.made import DATA, lm_eval

runner = CliRunner()


def compare(*arguments: object) -> tuple[int, str]:
    result = runner.invoke(app, ["eval", "compare", *map(str, arguments)])
    return result.exit_code, " ".join(result.output.split())


def test_compare_names_the_runs_and_writes_the_report(tmp_path: Path) -> None:
    code, said = compare(
        f"all-F={DATA / 'inspect-a.eval'}", f"1of4={DATA / 'inspect-b.eval'}",
        "-o", tmp_path, "--margin", 20,
    )  # fmt: skip
    assert code == 0, said
    assert said.startswith("1of4: ")
    assert "margin 20 points" in said
    data = json.loads((tmp_path / "eval.json").read_text())
    assert [arm["name"] for arm in data["arms"]] == ["all-F", "1of4"]
    assert data["facts"]["logs"] == "inspect"
    assert (tmp_path / "report.html").exists()


def test_compare_takes_a_second_run_and_a_bad_one(tmp_path: Path) -> None:
    runs = [
        str(lm_eval(tmp_path / name, lambda number, loss=loss: float(number % 5 >= loss)))
        for name, loss in (("full", 1), ("quarter", 1), ("again", 1), ("bad", 5))
    ]
    code, said = compare(
        *runs[:2], "--again", runs[2], "--bad", runs[3], "-o", tmp_path / "out", "--margin", 40
    )
    assert code == 0, said
    assert "A/A: 0 lost, 0 won of 40" in said
    assert "Not shown" not in said


def test_runs_that_cannot_be_compared_end_with_one_line(tmp_path: Path) -> None:
    place = lm_eval(tmp_path, lambda _: 1.0)
    code, said = compare(place, DATA / "inspect-a.eval", "-o", tmp_path / "out")
    assert code == 1
    assert "compare runs of one harness" in said
    assert not (tmp_path / "out").exists()


def test_a_folder_without_a_journal_is_named(tmp_path: Path) -> None:
    result = runner.invoke(app, ["eval", "report", str(tmp_path / "nowhere")])
    assert result.exit_code == 1
    assert "no output of" in " ".join(result.output.split())


def test_the_report_is_made_again_from_the_journal_alone(tmp_path: Path) -> None:
    with serving(Fake(in_requests=True)) as url:
        evaluate(tmp_path, url)
    assert runner.invoke(app, ["eval", "report", str(tmp_path)]).exit_code == 0
    first = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for name in first.keys() - {"journal.jsonl"}:
        (tmp_path / name).unlink()
    result = runner.invoke(app, ["eval", "report", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == first
    assert {"report.html", "eval.json", "samples.jsonl", "forest.png"} <= first.keys()
