"""kill -9 at random moments: the same command ends with the same files and repeats nothing."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sglang_indexcache.lab.evaluate.pattern_file import add_evaluated
from sglang_indexcache.library.files import Evaluated, load_entry
from tests.fixtures.landscape import SyntheticEvaluator
from tests.kills import PROCESSES
from tests.lab.search.helpers import searched
from tests.lab.search.slow_search import search
from tests.signals import hears_sigint


def start(output: Path, method: str = "greedy", servers: int = 1) -> Any:
    process = PROCESSES.Process(target=search, args=(output, method, servers))
    process.start()
    return process


def finish(process: Any) -> None:
    process.join(300)
    assert process.exitcode == 0


def results(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.yaml"))}


def evaluations(folder: Path) -> list[tuple[str, int]]:
    lines = (folder / "journal.jsonl").read_text().splitlines()[1:]
    entries = [json.loads(line) for line in lines]
    passes = [("one pass", entry["batch"]) for entry in entries if "kept_mass" in entry]
    judged = [(f"judged {e['pattern']}", e["batch"]) for e in entries if "judged" in e]
    losses = [entry for entry in entries if "losses" in entry]
    return passes + judged + [(e["pattern"], batch) for e in losses for batch in e["batches"]]


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


@pytest.mark.parametrize(
    ("method", "servers", "goal"),
    [("greedy", 1, 10), ("greedy", 3, 10), ("proposals", 1, 10), ("proposals", 3, 3)],
)
def test_kill_9_at_random_moments(tmp_path: Path, method: str, servers: int, goal: int) -> None:
    """It goes on also where several calls are in flight."""
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    finish(start(undisturbed, method))
    expected = results(undisturbed)
    assert {f"x-1of{r}.yaml" for r in (2, 4, 8)} <= set(expected)
    full_size = size(undisturbed / "journal.jsonl")
    moments = random.Random(0)
    journal, kills = killed / "journal.jsonl", 0
    while kills < goal:
        process = start(killed, method, servers)
        # Each life gets a random share of the work, so that the kills spread over all of it.
        enough = size(journal) + moments.uniform(0.0, 1.6 / goal) * full_size
        while process.is_alive() and size(journal) < min(enough, 0.97 * full_size):
            time.sleep(0.002)
        time.sleep(moments.uniform(0.0, 0.03))
        if not process.is_alive():
            break
        process.kill()
        process.join()
        kills += 1
    assert kills == goal
    finish(start(killed, method, servers))
    assert results(killed) == expected
    entries = evaluations(killed)
    assert sorted(entries) == sorted(evaluations(undisturbed))
    assert sum(kind == "one pass" for kind, _ in entries) == (8 if method == "proposals" else 0)


def test_what_was_measured_of_a_pattern_outlives_its_search(tmp_path: Path) -> None:
    evaluator, path = SyntheticEvaluator(8, 8), tmp_path / "x-1of4.yaml"
    searched(tmp_path, evaluator, "1/4")
    row = Evaluated(
        **{"verdict": "no loss", "margin": 0.01, "contexts": 8, "pairs": 32},
        **{"tasks": ("needles",), "lengths": (4096,), "checkpoint": "0" * 12},
    )
    add_evaluated(path, row)
    searched(tmp_path, evaluator, "1/4", "1/2")  # the same search, with a target more
    assert load_entry(path).evaluated == (row,)
    assert load_entry(tmp_path / "x-1of2.yaml").evaluated == ()
    other = path.read_text().replace(load_entry(path).pattern, "FFSSSSSS")
    path.write_text(other)
    searched(tmp_path, evaluator, "1/4", "1/2")  # that was of another pattern
    assert load_entry(path).pattern != "FFSSSSSS"
    assert load_entry(path).evaluated == ()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_search_leaves_a_usable_result(tmp_path: Path, number: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.lab.search.slow_search", str(tmp_path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        preexec_fn=hears_sigint,
        cwd=Path(__file__).parents[3],
    )
    while size(tmp_path / "journal.jsonl") < 4000 and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 130
    state = json.loads((tmp_path / "search.json").read_text())
    assert state["complete"] is False
    assert len(state["steps"]) > 1
    finish(start(tmp_path))
    assert json.loads((tmp_path / "search.json").read_text())["complete"] is True
