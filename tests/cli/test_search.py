import json
from pathlib import Path

import pytest
from scipy import stats
from typer.testing import CliRunner, Result

import sglang_indexcache
from sglang_indexcache.cli import app
from sglang_indexcache.library import load_entry
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.evaluators.synthetic import SyntheticEvaluator

TINY = Path(sglang_indexcache.__file__).parent / "demo" / "tiny-dsa"


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.mark.parametrize("method", ["fast", "oneshot", "forward", "greedy", "similarity"])
@pytest.mark.parametrize("refine", ["none", "screened", "swap", "beam"])
def test_every_method_leaves_valid_entries(tmp_path: Path, method: str, refine: str) -> None:
    result = call(
        *("search", "run", "--synthetic", "12", "--batches", "4", "-o", tmp_path, "--name", "x"),
        *("--method", method, "--refine", refine),
    )
    assert result.exit_code == 0, result.output
    evaluator = SyntheticEvaluator(12, 4 + 8)  # eight are held out
    all_full = evaluator.loss(Pattern.full(12), range(4)).values
    for label, full in (("1of2", 6), ("1of4", 3), ("1of8", 2)):
        entry = load_entry(tmp_path / f"x-{label}.yaml")
        assert entry.full_layers == full
        loss = evaluator.loss(Pattern(entry.pattern), range(4)).mean
        assert entry.quality[0].score == pytest.approx(loss, abs=1e-12)
        added = evaluator.loss(Pattern(entry.pattern), range(4)).values - all_full
        error = entry.method.details["added_loss_standard_error"]
        assert error == pytest.approx(added.std(ddof=1) / 2)  # paired, so that levels cancel
        fresh = [
            evaluator.loss(p, range(4, 12)) for p in (Pattern(entry.pattern), Pattern.full(12))
        ]
        interval = stats.ttest_rel(fresh[0].values, fresh[1].values).confidence_interval(0.95)
        told = entry.method.details["held_out_added_loss"]
        assert (told["low"], told["high"]) == pytest.approx(tuple(interval))
        assert entry.quality[1].score == pytest.approx(fresh[0].mean)
        before = entry.method.details["before_refinement"]["loss"]
        assert entry.quality[0].score <= before
        assert {"checkpoint", "data", "seed", "versions", "cost", "loss_curve"} <= set(
            entry.method.details
        )
    for name in ("losses.png", "search.json", "journal.jsonl"):
        assert (tmp_path / name).stat().st_size > 0


@pytest.mark.parametrize(
    ("score", "which"),
    [
        ("", "answer tokens"),
        ("late", "tokens in the later half of each sequence"),
        ("all", "all tokens"),
    ],
)
def test_says_which_tokens_count(tmp_path: Path, score: str, which: str) -> None:
    """Before the search, below the table, in the entry, the numbers and the journal."""
    data = tmp_path / "data.jsonl"
    with data.open("w") as file:
        for number in range(24):
            row = {"prompt": f"value = {number}\n" + "return self\n" * 60, "response": "yes"}
            file.write(json.dumps(row) + "\n")
    arguments = (
        *("search", "run", "--model", TINY, "--data", data, "--batches", "2", "--held-out", "2"),
        *("--target", "11", "-o", tmp_path / "out", "--name", "x"),
    )
    result = call(*arguments, *(["--score", score] if score else []))
    assert result.exit_code == 0, result.output
    output = " ".join(result.output.split())
    told = f"loss of {which} whose query sees more than 64 tokens"
    assert told in output
    assert f"every loss is that of {which}" in output
    assert "documents read" in output
    entry = load_entry(tmp_path / "out" / "x-11of12.yaml")
    assert entry.method.objective == f"language-modelling {told}"
    assert entry.method.details["counted"].startswith(which)
    assert "documents read" in entry.method.details["documents"]
    assert json.loads((tmp_path / "out" / "search.json").read_text())["objective"].startswith(which)
    other = call(*arguments, "--score", "late" if score == "all" else "all")
    assert "belongs to another search; different: counted" in " ".join(other.output.split())


def test_a_pattern_is_judged_by_data_that_did_not_choose_it(tmp_path: Path) -> None:
    result = call(
        *("search", "run", "--synthetic", "12", "--batches", "4", "-o", tmp_path, "--name", "x"),
        *("--held-out", "0", "--target", "1/4"),
    )
    assert "not measured" in result.output
    assert len(load_entry(tmp_path / "x-1of4.yaml").quality) == 1
    result = call("search", "run", "--synthetic", "12", "-o", tmp_path / "more", "--name", "x")
    assert "Judge it by that" in result.output


def test_says_the_budget_first_and_what_ran_last(tmp_path: Path) -> None:
    options = ("--target", "1/4", "--batches", "16", "--name", "x", "--method", "greedy")
    result = call("search", "run", "--synthetic", "12", *options, "-o", tmp_path, "--budget", "1")
    # 1 + 11 + 10 + ... + 3 evaluations of 16 batches of 1000 tokens; then two known schedules on
    # those, and three patterns on the 8 held-out batches.
    told = "budget: 1,024,000 tokens, 100.0 % of exhaustive greedy's; then 56,000 at most"
    assert told in result.output.replace("\n", " ")
    assert load_entry(tmp_path / "x-1of4.yaml").method.name == "exhaustive greedy (Algorithm 1)"


def test_constraints_reach_the_search(tmp_path: Path) -> None:
    result = call(
        *("search", "run", "--synthetic", "12", "-o", tmp_path, "--target", "4", "--name", "x"),
        *("--keep-full", "2", "--force-shared", "7-8", "--stages", "2"),
    )
    assert result.exit_code == 0, result.output
    text = load_entry(tmp_path / "x-4of12.yaml").pattern
    assert text[0] == text[2] == text[6] == "F"
    assert text[7] == text[8] == "S"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--synthetic", "8", "--method", "magic"], "method 'magic' is unknown"),
        (["--synthetic", "8", "--budget", "2"], "share must be above 0 and at most 1"),
        (["--synthetic", "8", "--budget", "0.01"], "too little: fast greedy (lazy re-evaluation"),
        (["--synthetic", "8", "--method", "forward", "--target", "+1%"], "stop at a loss budget"),
        (["--synthetic", "8", "--method", "fast:2"], "method fast takes no number"),
        (["--synthetic", "8", "--method", "greedy:x"], "method greedy takes a number"),
        (["--synthetic", "8", "--method", "greedy:9"], "8 layers cannot be cut into 9 blocks"),
        (["--synthetic", "8", "--refine", "beam:0"], "the beam must be at least 1 wide"),
        (["--synthetic", "8", "--context", "2 K"], "a length is a number of tokens like 4096"),
        (["--synthetic", "8", "--engine", "default"], "only one of --url, --engine and --synth"),
        (["--synthetic", "8", "--target", "9"], "can only reach 1 to 8"),
        (["--synthetic", "8", "--keep-full", "a"], "not a list of layers"),
        ([], "give the checkpoint's folder with --model"),
        (["--model", "missing"], "cannot read missing/config.json"),
        (["--synthetic", "8", "--model", "m"], "--synthetic makes the model up; leave --model"),
        (["--synthetic", "8", "--dtype", "bfloat16"], "--dtype is for transformers"),
        (["--model", "m", "--url", "http://h", "--dtype", "float32"], "--dtype is for transf"),
        (["--model", "m", "--engine", "default", "--dtype", "float32"], "--dtype is for transf"),
        (["--synthetic", "8", "--timeout", "9"], "--timeout is for the servers of --url"),
        (["--synthetic", "8", "--at-once", "2"], "--at-once is for the servers of --url"),
        (["--synthetic", "8", "--low-priority"], "--low-priority is for the servers of --url"),
        (["--synthetic", "8", "--score", "late"], "a made-up landscape has none"),
        (["--model", "m", "--score", "early"], "the score is answers, late, all, got 'early'"),
        (["--model", str(TINY), "--score", "answers"], "no document of machine marks an answer"),
        (["--model", "m", "--dtype", "int3"], "--dtype is float32 or bfloat16, got 'int3'"),
        # It selects 64 tokens: all patterns would tie, and the lowest layers be flipped first.
        (["--model", str(TINY), "--context", "64"], "cannot tell patterns apart: this model's"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    result = call("search", "run", "-o", tmp_path / "out", *arguments)
    assert result.exit_code == 1
    assert result.output.startswith("indexcache: error: ")
    assert message in result.output
    assert not (tmp_path / "out" / "search.json").exists()


def test_stability(tmp_path: Path) -> None:
    result = call("search", "stability", "--synthetic", "12", "--batches", "8", "-o", tmp_path)
    assert result.exit_code == 0, result.output
    assert "Kendall tau" in result.output
    assert (tmp_path / "stability.json").exists()
    assert (tmp_path / "set-2" / "losses.png").exists()


def test_cost() -> None:
    result = call("search", "cost", "--layers", "47", "--target", "1", "--rate", "1e6")
    assert "1,082" in result.output
    assert result.exit_code == 0
    assert "100 % of a server's 1 data-parallel ranks" in " ".join(result.output.split())


def test_cost_counts_idle_ranks() -> None:
    """2 sequences on 8 ranks: 1082 evaluations of 1e6 tokens, at a quarter of 1e6 a second."""
    size = ("--sequences", "10", "--context", "100K", "--target", "1", "--method", "greedy")
    rate = ("--rate", "1e6", "--dp", "8", "--per-batch", "2")
    result = call("search", "cost", "--layers", "47", *size, *rate)
    assert "1.2" in result.output  # hours
    said = " ".join(result.output.split())
    assert "25 % of a server's 8 data-parallel ranks at work" in said
    assert "assumed, not measured: each server prefills 1,000,000 tokens a second" in said


def test_compare_needs_two() -> None:
    result = call("search", "compare", "full", "-o", "nowhere", "--model", "missing")
    assert result.exit_code == 1
    assert "at least two patterns" in result.output
