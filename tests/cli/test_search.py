import json
import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

import sglang_indexcache
from sglang_indexcache.cli import app
from sglang_indexcache.lab.search.evaluators.hf import TransformersEvaluator
from sglang_indexcache.lab.stats.bounds import Estimate
from sglang_indexcache.library.files import load_entry
from sglang_indexcache.pattern import Pattern
from tests.fixtures.landscape import SeenEvaluator, SyntheticEvaluator
from tests.lab.search.helpers import searched

TINY = Path(sglang_indexcache.__file__).parent / "lab" / "demo" / "tiny-dsa"


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def words_of(result: Result) -> str:
    return " ".join(result.output.split())


@pytest.mark.parametrize("method", ["greedy", "proposals"])
def test_every_method_leaves_valid_entries(tmp_path: Path, method: str) -> None:
    evaluator = SeenEvaluator(12, 4 + 8)
    search, _ = searched(tmp_path, evaluator, held_out=8, method=method)
    full = Pattern.full(12)
    for label, count in (("1of2", 6), ("1of4", 3), ("1of8", 2)):
        entry = load_entry(tmp_path / f"x-{label}.yaml")
        assert entry.full_layers == count
        pattern, details = Pattern(entry.pattern), entry.method.details
        if method == "greedy":
            added = evaluator.loss(pattern, range(4)) - evaluator.loss(full, range(4))
            error = details["added_loss_standard_error"]
            assert error == pytest.approx(added.std(ddof=1) / 2)  # paired, so that levels cancel
        else:
            assert {*details["layers"]} == {*map(str, pattern.full_layers)} - {"0"}
            for layer in details["layers"].values():  # by loss, and the file once said by KL
                assert {*layer} == {"share_of_proposals", "loss_added_without"}
        fresh = evaluator.loss(pattern, range(4, 12)) - evaluator.loss(full, range(4, 12))
        loss = details["held_out"]["loss"]
        assert (loss["low"], loss["high"]) == pytest.approx(
            Estimate.of(fresh).interval(0.95), abs=1e-6
        )
        assert (loss["documents"], loss["lost"]) == (8, (fresh > 0).sum())
        assert loss["worst"] == pytest.approx(fresh.max(), abs=1e-6)
        judged = evaluator.judge(pattern, range(4, 12))
        kl = float(np.mean([each.kl["passages"] for each in judged]))
        assert details["held_out"]["kl"]["passages"] == pytest.approx(kl, abs=1e-6)
        measured = {row.benchmark.partition(",")[0]: row for row in entry.quality}
        assert measured["loss"].score == pytest.approx(evaluator.loss(pattern, range(4, 12)).mean())
        assert "held-out documents (text)" in measured["loss"].benchmark
        assert {"checkpoint", "data", "seed", "versions", "cost", "judged_on"} <= set(details)
    numbers = json.loads((tmp_path / "search.json").read_text())
    safe = search.safe
    assert numbers["smallest_that_keeps_recall"] == (safe.mark.label if safe else None)


def documents(path: Path, count: int = 24) -> Path:
    with path.open("w") as file:
        for number in range(count):
            row = {"prompt": f"value = {number}\n" + "return self\n" * 60, "response": "yes"}
            file.write(json.dumps(row) + "\n")
    return path


@pytest.mark.parametrize(
    ("score", "tokens"),
    [
        ("", "answer tokens"),
        ("late", "tokens in the later half of each sequence"),
        ("all", "all tokens"),
    ],
)
def test_says_which_tokens_count(tmp_path: Path, score: str, tokens: str) -> None:
    """They stand before the search, below the table, in the entry, numbers and journal."""
    data = documents(tmp_path / "data.jsonl")
    arguments = (
        *("search", "run", "--model", TINY, "--data", data, "--batches", "2", "--held-out", "2"),
        *("--target", "11", "--method", "greedy", "-o", tmp_path / "out"),
    )
    result = call(*arguments, *(["--score", score] if score else []))
    assert result.exit_code == 0, result.output
    output = words_of(result)
    sentence = f"{tokens} whose query sees more than 64 tokens"
    assert sentence in output
    assert f"counted: {tokens}" in output
    assert "documents read" in output
    entry = load_entry(tmp_path / "out" / "tiny-dsa-11of12.yaml")
    assert entry.method.objective == f"language-modelling loss of {sentence}"
    assert entry.method.details["counted"].startswith(tokens)
    assert "documents read" in entry.method.details["documents"]
    assert json.loads((tmp_path / "out" / "search.json").read_text())["objective"].startswith(
        tokens
    )
    refusal = call(*arguments, "--score", "late" if score == "all" else "all")
    assert "belongs to another search; different: counted" in words_of(refusal)
    more = words_of(call(*arguments, "--score", score or "answers", "--batches", "3"))
    assert "--batches (2 then, 3 now)" in more
    assert not re.search("[0-9a-f]{40}", more)
    numbers = json.loads((tmp_path / "out" / "search.json").read_text())
    assert numbers["data"] == entry.method.data


def test_a_pattern_is_judged_by_data_that_did_not_choose_it(tmp_path: Path) -> None:
    _, output = searched(tmp_path, SeenEvaluator(12, 4), "1/4", method="proposals")
    assert "1/4 on the 4 documents that chose it: KL to all F text " in output
    assert "compare them on others" in output
    _, output = searched(tmp_path / "greedy", SeenEvaluator(12, 4), "1/4")
    assert "nothing was run beside all F: compare the patterns with it" in output
    assert load_entry(tmp_path / "greedy" / "x-1of4.yaml").quality == ()
    _, output = searched(
        tmp_path / "more", SeenEvaluator(12, 12), "1/4", held_out=8, method="proposals"
    )
    assert "1/4 on 8 held-out documents: KL to all F text " in output
    assert "likeliest tokens kept text " in output
    assert "so judge by them" in output
    assert "with 8 documents, a loss that sits in up to 31 % of documents can go unseen" in output
    assert "1/4 layers: sure of " in output


def test_says_that_a_target_loses_recall_and_what_does_not(tmp_path: Path) -> None:
    """The landscape's recall falls with the damage, so that a twelfth cannot keep it."""
    evaluator = SeenEvaluator(12, 12)
    search, output = searched(tmp_path, evaluator, "9", "1", held_out=4, method="proposals")
    assert "1/12 (-" in output
    assert re.search("loses? 2 points of recall or more", output)
    safe = search.safe
    if safe is None:
        assert "no pattern that was found keeps recall on this data" in output
    else:
        named = (
            f"the fewest F layers that lose less than 2 points of recall here: {safe.mark.label}"
        )
        assert named in output


def test_says_the_budget_first_and_what_ran_last(tmp_path: Path) -> None:
    evaluator = SyntheticEvaluator(12, 24)
    _, output = searched(tmp_path, evaluator, "1/4", held_out=8)
    # 1 + 11 + 10 + ... + 3 evaluations of 16 batches of 1000 tokens; then three patterns on the 8
    # held-out batches.
    assert "1,024,000 tokens, 100.0 % of exhaustive greedy's" in output
    assert "64.0 patterns on all 16,000 tokens; then 24,000 at most" in output
    assert "compare what was found on 8 held-out sequences" in output
    assert load_entry(tmp_path / "x-1of4.yaml").method.name == "exhaustive greedy (Algorithm 1)"


def test_layers_that_stay_full_reach_the_search(tmp_path: Path) -> None:
    searched(tmp_path, SyntheticEvaluator(12, 8), "4", keep_full=(2, 6))
    text = load_entry(tmp_path / "x-4of12.yaml").pattern
    assert text[0] == text[2] == text[6] == "F"


def test_a_dry_run_tells_tokens(tmp_path: Path) -> None:
    data, output = documents(tmp_path / "data.jsonl"), tmp_path / "out"
    arguments = (
        *("search", "run", "--model", TINY, "--data", data, "--batches", "2", "--held-out", "2"),
        *("--target", "11", "--dry-run", "-o", output),
    )
    cost = words_of(call(*arguments, "--method", "greedy"))
    match = re.search(r"cost ([\d,]+) tokens at most", cost)
    assert match is not None, cost
    tokens = int(match[1].replace(",", ""))
    # 12 evaluations of 2 batches, three patterns on 2 held-out ones.
    [length] = {int(n) for n in re.findall(r"batches of (\d+) tokens", cost)}
    assert tokens == pytest.approx((12 * 2 + 3 * 2) * length, rel=0.05)
    assert not output.exists()


def test_a_plan_says_that_greedy_may_cost_less_and_that_nothing_checks_the_search(
    tmp_path: Path,
) -> None:
    for number in range(40):
        words = " ".join(f"word{number} {i}" for i in range(300))
        (tmp_path / f"{number}.txt").write_text(words)
    arguments = ("search", "run", "--model", TINY, "--data", tmp_path, "--dry-run")
    arguments = (*arguments, "--context", "96", "-o", tmp_path / "out")
    few = words_of(call(*arguments, "--batches", "1"))
    assert "Algorithm 1 may cost less: --method greedy" in few
    assert "no pattern is measured on it" in few
    assert "0 held-out sequences" in few
    many = words_of(call(*arguments, "--batches", "16", "--held-out", "4"))
    assert "--method greedy" not in many


def test_the_default_runs_what_one_pass_proposes_and_measures_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = (
        *("search", "run", "--model", TINY, "--context", "96", "--batches", "2"),
        *("--held-out", "2", "--target", "3", "-o", tmp_path, "--figures", "svg"),
    )
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    text = (tmp_path / "tiny-dsa-3of12.yaml").read_text()
    assert "name: loss, in text and recall alike, among exchanges of layers" in text
    assert "tokens: text, passages" in text
    assert (tmp_path / "pairs.svg").stat().st_size > 0
    entries = [json.loads(line) for line in (tmp_path / "journal.jsonl").open()][1:]
    passes = [entry["batch"] for entry in entries if "kept_mass" in entry]
    assert passes == [0, 1]

    def again(*_: object) -> None:
        raise AssertionError("it was measured before")

    monkeypatch.setattr(TransformersEvaluator, "kept_mass", again)
    monkeypatch.setattr(TransformersEvaluator, "changes", again)
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "tiny-dsa-3of12.yaml").read_text() == text


def test_a_config_file_gives_options_and_the_command_line_wins(tmp_path: Path) -> None:
    config = tmp_path / "search.yaml"
    data = documents(tmp_path / "data.jsonl")
    config.write_text(f"model: {TINY}\ndata: {data}\nbatches: 3\nheld-out: 2\ntarget: 1/2\n")
    arguments = ("search", "run", "--config", config, "--dry-run", "-o", tmp_path / "out")
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    assert "3 batches of" in words_of(result)
    assert "targets 1/2 " in words_of(result)
    assert "2 batches of" in words_of(call(*arguments, "--batches", "2"))
    for text, message in (
        ("per_batch: 2", "'per_batch' is no option of"),
        ("- a", "must hold options"),
        ("a: [", "cannot be read"),
        ("seed: 1\nseed: 2", "line 2 gives 'seed' again"),
        ("held-out: 1\nheld_out: 2", "'held_out' is given twice"),
    ):
        config.write_text(text)
        assert message in words_of(call(*arguments))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "magic"], "method 'magic' is unknown"),
        (["--target", "+1%"], "neither a ratio (1/4) nor a count"),
        (["--context", "2 K"], "a length is a number of tokens like 4096"),
        (["--dtype", "bfloat16", "--url", "http://h"], "--dtype is for transformers"),
        (["--dtype", "int3"], "--dtype is float32 or bfloat16, got 'int3'"),
        (["--target", "13"], "can only reach 1 to 12"),
        (["--keep-full", "a"], "not a list of layers"),
        (["--keep-full", "5-3"], "layers 5-3 go backwards; write 3-5"),
        (["--held-out", "1"], "one held-out document shows no spread"),
        (["--model", "missing"], "missing is no folder of this machine"),
        (["--at-once", "2"], "--at-once is for the servers of --url"),
        (["--score", "early"], "the score is answers, recall, late, all, got 'early'"),
        (["--score", "answers"], "no document of machine marks an answer"),
        # It selects 64 tokens: all patterns would tie, and the lowest layers be flipped first.
        (["--context", "64"], "cannot tell patterns apart: this model's"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    model = () if "--model" in arguments else ("--model", TINY)
    result = call("search", "run", "-o", tmp_path / "out", *model, "--batches", "2", *arguments)
    assert result.exit_code == 1
    assert message in words_of(result)
    assert "indexcache: error: " in result.output
    assert not (tmp_path / "out" / "search.json").exists()


def test_compare_needs_two_with_names_of_their_own(tmp_path: Path) -> None:
    """The results of two seeds' files, which have one name, could not be told apart."""
    command = ("search", "compare", "full", "-o", tmp_path / "out", "--model", TINY)
    assert "at least two patterns" in call(*command).output
    result = call(*command, "a/found-1of4.yaml", "b/found-1of4.yaml")
    assert result.exit_code == 1
    assert "two patterns are called found-1of4, so that" in words_of(result)
    assert "a name of its own: NAME=PATTERN" in words_of(result)
