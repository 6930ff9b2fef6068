"""Search over HTTP on each objective, and what a user's questions get of it.

On the shipped small checkpoint: one real server in live mode, `indexcache search run` once for each
``--score`` with everything else at its default, then held-out questions to the same server under
every pattern that was found, under uniform interleaving and under all F.

python -m benchmarks.search_served --work runs/served

What was searched and asked stays in the work folder, so a killed run goes on where it was; the
patterns of the library are those of ``runs/served/answers``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.search_objectives import CHECKPOINT, USERS_TASKS, Documents, over_full, rows_of
from sglang_indexcache.ask.client import Client
from sglang_indexcache.ask.launch import Server
from sglang_indexcache.data.retrieval import TaskDocument
from sglang_indexcache.library import load_entry
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.calibration import Score
from sglang_indexcache.search.evaluators import Floats
from sglang_indexcache.study.plots import make_figure, save_figure
from sglang_indexcache.study.provenance import checkpoint_digest, machine
from sglang_indexcache.support.files import write_json

RESULTS = Path(__file__).parent / "results" / "search" / "tiny-dsa"
LAYERS, LENGTH = 12, 512
MARKS = {"1of2": 6, "1of4": 3, "1of8": 2}
"""F layers of the patterns that a search writes."""
SCORES = tuple(score.value for score in Score)
SEARCH = ("--context", str(LENGTH), "--batches", "16", "--per-batch", "2", "--held-out", "8")
PER_REQUEST = 8


def run(*command: str) -> None:
    """One `indexcache` command, as a user would type it."""
    print("indexcache", *command, flush=True)
    subprocess.run([sys.executable, "-m", "sglang_indexcache.cli", *command], check=True)


def search(client: Client, work: Path) -> dict[str, dict[int, Pattern]]:
    """What each objective finds, by its number of F layers."""
    found: dict[str, dict[int, Pattern]] = {}
    for score in SCORES:
        folder, kept = work / score, RESULTS / score
        where = ("--model", str(CHECKPOINT), "--url", client.url, "--output", str(folder))
        what = ("--data", str(work / "documents.jsonl"), "--score", score)
        run("search", "run", *where, *what, *SEARCH)
        kept.mkdir(parents=True, exist_ok=True)
        for name in ("search.json", "losses.png"):
            shutil.copy(folder / name, kept)
        entries = {count: load_entry(folder / f"tiny-dsa-{m}.yaml") for m, count in MARKS.items()}
        found[score] = {count: Pattern(entry.pattern) for count, entry in entries.items()}
    return found


class Questions:
    """Held-out documents with questions, asked of the server and remembered in a journal.

    Args:
        client: of the server in live mode.
        journal: a file; what is in it is not asked again.
        rows: documents of each task.
    """

    def __init__(self, client: Client, journal: Path, rows: int) -> None:
        self._client, self._journal = client, journal
        documents = Documents(LENGTH)
        self._asked = {
            task: [documents.held_out(task, row) for row in rows_of(task, rows)]
            for task in USERS_TASKS
        }
        self._known: dict[tuple[str, str], list[float]] = {}
        for line in journal.read_text().splitlines() if journal.exists() else ():
            row = json.loads(line)
            self._known[row["pattern"], row["task"]] = row["right"]

    def right(self, pattern: Pattern, task: str) -> Floats:
        """``[documents]`` share of each document's answers that are the most probable tokens."""
        key = (str(pattern), task)
        if len(self._known.get(key, ())) != len(self._asked[task]):
            self._client.switch_pattern(str(pattern))
            asked = self._asked[task]
            parts = [asked[i : i + PER_REQUEST] for i in range(0, len(asked), PER_REQUEST)]
            self._known[key] = [share for part in parts for share in self._ask(part)]
            with self._journal.open("a") as journal:
                row = {"pattern": key[0], "task": task, "right": self._known[key]}
                journal.write(json.dumps(row) + "\n")
        return np.array(self._known[key])

    def _ask(self, documents: Sequence[TaskDocument]) -> list[float]:
        replies = self._client.generate(
            input_ids=[document.ids for document in documents],
            sampling_params={"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True},
            return_logprob=True,
            logprob_start_len=0,
            top_logprobs_num=1,
        )
        return [right_share(reply, doc) for reply, doc in zip(replies, documents, strict=True)]


def right_share(reply: Mapping[str, Any], document: TaskDocument) -> float:
    """The share of a document's answers that the server would have given.

    Args:
        reply: SGLang's, with the most probable token of every position; its first entry is empty.
        document: teacher forced.
    """
    best = [entry[0][1] if entry else None for entry in reply["meta_info"]["input_top_logprobs"]]
    places = [place for place, is_answer in enumerate(document.answer) if is_answer]
    return float(np.mean([best[place] == document.ids[place] for place in places]))


def summary(questions: Questions, pattern: Pattern) -> dict[str, Any]:
    """A pattern's accuracy by task, and what it adds to all F's, paired by document."""
    tasks: dict[str, Any] = {}
    for task in USERS_TASKS:
        own, base = (questions.right(p, task) for p in (pattern, Pattern.full(LAYERS)))
        tasks[task] = {"documents": len(own), **over_full(own, base)}
    return {"pattern": str(pattern), "tasks": tasks}


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Accuracy by retention, a panel a task, a line an objective and one for uniform."""
    figure, axes = make_figure(13, 3.2, 1, len(USERS_TASKS), sharey=True)
    colours = {"answers": "C2", "late": "C0", "all": "C3", "uniform": "grey"}
    for axis, task in zip(axes, USERS_TASKS, strict=True):
        full = result["full"]["tasks"][task]["accuracy"]
        axis.axhline(100 * full, color="black", linestyle=":", label="all F")
        for shift, (name, marks) in enumerate(result["found"].items()):
            tasks = [mark["tasks"][task] for mark in marks.values()]
            axis.errorbar(
                [place + 0.12 * (shift - 1.5) for place in range(len(marks))],
                [100 * found["accuracy"] for found in tasks],
                yerr=[100 * (found["half_width"] or 0) for found in tasks],
                fmt="o", markersize=5, capsize=2, color=colours[name],
                label="uniform" if name == "uniform" else f"--score {name}",
            )  # fmt: skip
        axis.set_xticks(range(len(MARKS)), [f"{count} F" for count in MARKS.values()])
        axis.set_title(task, size=9)
        axis.set_ylim(-2, 102)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("held-out answers right, %")
    axes[0].legend(fontsize=8)
    save_figure(figure, path)


def main() -> None:
    """Search, ask, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="log, data and journal")
    parser.add_argument("--rows", type=int, default=24, help="held-out documents of each task")
    arguments = parser.parse_args()
    work: Path = arguments.work
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "documents.jsonl").exists():
        model = ("--model", str(CHECKPOINT))
        run("train", "data", *model, "--output", str(work), "--rows", "48")
    flags = ("--attention-backend", "indexcache", "--indexcache-mode", "live", "--dtype", "float32")
    with Server(["--model-path", str(CHECKPOINT), *flags], work / "server.log") as server:
        client = server.wait_until_ready()
        found = search(client, work)
        questions = Questions(client, work / "asked.jsonl", arguments.rows)
        blind = {count: Pattern.uniform(LAYERS, LAYERS // count) for count in MARKS.values()}
        asked = {
            name: {str(count): summary(questions, pattern) for count, pattern in marks.items()}
            for name, marks in {**found, "uniform": blind}.items()
        }
        result = {
            "what": "what searches over HTTP find on each objective, and held-out answers right",
            "checkpoint": checkpoint_digest(CHECKPOINT),
            "machine": machine(),
            "full": summary(questions, Pattern.full(LAYERS)),
            "found": asked,
        }
    write_json(RESULTS / "served.json", result)
    draw(result, RESULTS / "served.png")


if __name__ == "__main__":
    main()
