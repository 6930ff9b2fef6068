"""``indexcache eval`` on the small checkpoint's tokens and a fake server."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

import sglang_indexcache
from sglang_indexcache.cli.eval import _servers
from sglang_indexcache.lab.evaluate.evaluation import load
from sglang_indexcache.library.writing import shipped
from tests.cli import output_of
from tests.fakes.server import serving
from tests.lab.evaluate.evaluate import evaluate
from tests.lab.evaluate.fake_server import Fake
from tests.lab.evaluate.harness_logs import lm_eval, plain
from tests.lab.evaluate.tasks.published import aa_lcr_row, prompt_row, write

TINY = Path(sglang_indexcache.__file__).parent / "lab" / "demo" / "tiny-dsa"
HALF, QUARTER = (shipped("patterns") / f"tiny-dsa-{name}.yaml" for name in ("1of2", "1of4"))
SMALL = (
    *("--model", TINY, "--task", "notes", "--length", "256", "--contexts", "4"),
    *("--looks", "1", "--margin", "20"),
)


evaluate_with = partial(output_of, "eval", "run")
plan = partial(evaluate_with, "--dry-run")
compare = partial(output_of, "eval", "compare")


def test_an_evaluation_tells_its_cost_first_and_then_its_verdicts(tmp_path: Path) -> None:
    with serving(Fake()) as url:
        command = ("1/4", "1/2", *SMALL, "--url", url, "-o", tmp_path / "out")
        text = evaluate_with(*command)
        again = evaluate_with(*command)
        another = evaluate_with(*command, "--seed", "3", code=1)
    assert text.index("cost ") < text.index("measured at the longest") < text.index("1/2: ")
    assert "full (reference), 1/2 (candidate), 1/4 (candidate)" in text  # fewer F come later
    assert "can show a loss of" in text
    assert "resuming: 6 contexts" in again
    assert "belongs to another evaluation; different: plan" in another
    evaluation = load(tmp_path / "out")
    assert evaluation.finished
    assert [arm.name for arm in evaluation.candidates] == ["1/2", "1/4"]
    assert evaluation.facts["server"]["dtype"] == "bfloat16"
    assert evaluation.facts["model"] == "tiny-dsa"
    assert {p.name for p in (tmp_path / "out").iterdir()} >= {"eval.json", "report.html"}


@pytest.mark.parametrize(
    ("patterns", "control"),
    [
        (("1/2",), "uniform:1/4 (bad)"),
        (("uniform:1/4",), "uniform:1/8 (bad)"),
        (("uniform:1/4", "uniform:1/8"), "first-layer-only (bad)"),
    ],
)
def test_the_control_loses_a_little_and_is_no_candidate(
    patterns: tuple[str, ...], control: str
) -> None:
    assert control in plan(*patterns, *SMALL)


def test_a_control_that_the_checkpoint_has_no_indexers_for_is_passed_over(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for path in TINY.glob("*.json"):
        (model / path.name).write_bytes(path.read_bytes())
    config = json.loads((TINY / "config.json").read_text())
    kinds = ["full" if layer < 4 else "shared" for layer in range(config["num_hidden_layers"])]
    (model / "config.json").write_text(json.dumps(config | {"indexer_types": kinds}))
    pattern = "FFSSSSSSSSSS"
    options = ("--against", "FFFFSSSSSSSS", *SMALL, "--model", model)
    assert "first-layer-only (bad)" in plan(pattern, *options)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("1/4", "1/4"), "1/4 and 1/4 are the same pattern"),
        (("full",), "full and full are the same pattern"),
        (("uniform:1/4", "--control", "FSSSFSSSFSSS"), "are the same pattern, FSSSFSSSFSSS"),
        (("1/4", "--length", "64"), "64 tokens can show nothing"),
    ],
)
def test_what_cannot_be_planned_is_refused(arguments: tuple[str, ...], sentence: str) -> None:
    text = plan(*SMALL, *arguments, code=1)
    assert sentence in text
    assert "contexts" not in text.partition("error: ")[0]  # before the plan is printed


def test_a_context_that_the_server_does_not_take_is_refused(tmp_path: Path) -> None:
    fake = Fake(info={"max_req_input_len": 255})
    with serving(fake) as url:
        text = evaluate_with("1/4", *SMALL, "--url", url, "-o", tmp_path / "out", code=1)
    assert "256 tokens with question and answer does not fit" in text
    assert fake.calls == 0


@pytest.mark.parametrize(
    ("urls", "sentence"),
    [
        ((), "give --url URL of one in live mode"),
        (("http://a", "http://b"), "two servers are given for all arms; write NAME=URL"),
        (("full=http://a", "full=http://b"), "two servers are given for full"),
    ],
)
def test_servers_are_named(tmp_path: Path, urls: tuple[str, ...], sentence: str) -> None:
    options = [part for url in urls for part in ("--url", url)]
    assert sentence in evaluate_with("1/4", *SMALL, "-o", tmp_path / "out", *options, code=1)


def test_a_server_is_named_as_its_pattern_is_or_was_written(tmp_path: Path) -> None:
    file = tmp_path / "seed=1" / "mine-1of4.yaml"
    file.parent.mkdir()
    file.touch()
    urls = [f"{file}=http://a:1", "L=http://b", "1/2=http://c", "full=http://d:30000"]
    clients = _servers(urls, None)
    assert {name: client.name for name, client in clients.items()} == {
        "mine-1of4": "the server at http://a:1",
        "L": "the server at http://b",
        "1/2": "the server at http://c",
        "full": "the server at http://d:30000",
    }
    assert list(_servers(["http://a:1"], None)) == [""]


FILES = ("--model", TINY, "--length", "512", "--looks", "1", "--margin", "20")


def test_a_users_files_are_planned_and_what_is_left_out_is_told(tmp_path: Path) -> None:
    lcr = write(tmp_path / "lcr.csv", [aa_lcr_row(n) for n in range(6)])
    prompts = write(
        tmp_path / "own.jsonl", [prompt_row(n, "yes", 5 + 60 * (n > 0)) for n in range(4)]
    )
    rows = ("--rows", f"aa-lcr={lcr}", "--rows", f"prompts={prompts}")
    text = plan("1/4", *FILES, *rows, "--contexts", "4")
    assert (
        "aa-lcr: 4 of 6 rows are asked: 4 at 512 tokens. Left out: 2 more than --contexts 4" in text
    )
    assert "prompts: 3 of 4 rows are asked: 3 at 512 tokens (all that it has, of 4 asked f" in text
    assert "1 of at most 64 tokens (index_topk)" in text
    assert "2 cells, 7 paired questions; control (notes) at 48 tokens" in text
    assert "Plan more (--contexts)" in text
    assert "1 cell, 3 paired questions" in plan("1/4", *FILES, "--rows", f"prompts={prompts}")


def test_compare_names_the_runs_and_writes_the_report(tmp_path: Path) -> None:
    full, quarter = (plain(tmp_path / name, lambda n: n % 5 / 4) for name in "ab")
    text = compare(f"all-F={full}", f"1of4={quarter}", "-o", tmp_path, "--margin", "20")
    assert text.startswith("1of4: ")
    assert "margin 20 points" in text
    data = json.loads((tmp_path / "eval.json").read_text())
    assert [arm["name"] for arm in data["arms"]] == ["all-F", "1of4"]
    assert data["facts"]["logs"] == "plain"
    assert (tmp_path / "report.html").exists()


def test_compare_takes_a_second_run_and_a_bad_one(tmp_path: Path) -> None:
    runs = [
        str(lm_eval(tmp_path / name, lambda number, loss=loss: float(number % 5 >= loss)))
        for name, loss in (("full", 1), ("quarter", 1), ("again", 1), ("bad", 5))
    ]
    further = ("--again", runs[2], "--bad", runs[3], "--margin", "40")
    text = compare(*runs[:2], *further, "-o", tmp_path / "out")
    assert "A/A: 0 lost, 0 won of 40" in text
    assert "Not shown" not in text


def test_runs_that_cannot_be_compared_end_with_one_line(tmp_path: Path) -> None:
    place = lm_eval(tmp_path, lambda _: 1.0)
    plain_run = plain(tmp_path, lambda _: 1.0)
    text = compare(place, plain_run, "-o", tmp_path / "out", code=1)
    assert "compare runs of one harness" in text
    # With contexts enough, a run given twice was called "no loss".
    for runs in ((place, place), (place, plain_run, "--again", place)):
        text = compare(*runs, "-o", tmp_path / "out", code=1)
        assert "are the same run" in text
    assert not (tmp_path / "out").exists()


def test_a_folder_without_a_journal_is_named(tmp_path: Path) -> None:
    assert "no output of" in output_of("eval", "report", tmp_path / "nowhere", code=1)


def test_the_report_is_made_again_from_the_journal_alone(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with serving(Fake()) as url:
        evaluate(folder, url)
    output_of("eval", "report", folder)
    first = {path.name: path.read_bytes() for path in folder.iterdir()}
    for name in first.keys() - {"journal.jsonl"}:
        (folder / name).unlink()
    output_of("eval", "report", folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == first
    assert {"report.html", "eval.json"} <= first.keys()


def test_unknown_rows_are_refused() -> None:
    text = plan("1/4", *FILES, "--rows", "sums=a.jsonl", code=1)
    assert "--rows sums=... is none of aa-lcr, prompts" in text
