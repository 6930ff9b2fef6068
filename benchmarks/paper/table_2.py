"""Table 2 in small: patterns without training, interleaved against searched, at 1/2, 1/4 and 1/8.

    python -m benchmarks.paper.table_2 --quick
    python -m benchmarks.paper.table_2

The small trained model answers held-out documents under each pattern, in transformers; all F of the
same document is what each is compared with. The searched patterns are the library's, or those of
``--pattern``. On a model of yours the same question is asked by ``indexcache eval run``, with a
margin and a verdict. Writes training_free.json and .md.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.paper import SMALL
from benchmarks.records import read_arguments
from benchmarks.training.batches import TEXT
from benchmarks.training.scores import Scorer
from sglang_indexcache.data.retrieval import TEXT_CHARACTERS, chance
from sglang_indexcache.stats.bounds import half_width
from sglang_indexcache.study.provenance import checkpoint_digest, machine
from sglang_indexcache.support.files import write_json, write_whole

TASKS = (TEXT, "recall", "needles")
PATTERNS = ["full", "uniform:1/2", "1/2", "uniform:1/4", "1/4", "uniform:1/8", "1/8"]
QUICK = {"rows": 2, "text_characters": 400_000}

ABOUT = """All of it was measured here. ± is half of a 95 % interval over documents, each compared
with itself under the first pattern. With --quick there are two, and numbers mean nothing.
The paper's own: indexcache patterns show glm-4.7-flash-dsa-1of4"""

Line = dict[str, Any]


def lines(
    model: Path, patterns: list[str], rows: int, length: int, text_characters: int
) -> list[Line]:
    """One for each pattern; the first is what the others are compared with, by document."""
    found: list[Line] = []
    for name in patterns:
        scorer = Scorer(model, name, text_characters)
        tasks = scorer.scores(length, rows)["tasks"]
        values = {task: tasks[task]["per_row"] for task in TASKS}
        base = found[0]["documents"] if found else values
        line: Line = {"name": name, "documents": values}
        for task in TASKS:
            over = [mine - its for mine, its in zip(values[task], base[task], strict=True)]
            line[task] = {
                "mean": sum(values[task]) / rows,
                "over_first": sum(over) / rows,
                "half_width": half_width(over),
            }
        found.append(line)
        print(name, {task: round(line[task]["mean"], 3) for task in TASKS}, flush=True)
    return found


def table(found: list[Line], length: int) -> str:
    """Markdown: each task and what the pattern adds to it; intervals of 95 % over documents."""
    header = ("pattern", "text loss, nats", "added", "recall, %", "added", "needles, %", "added")
    text = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    for line in found:
        cells = []
        for task in TASKS:
            scale, digits = (1, 3) if task == TEXT else (100, 1)
            value, half = line[task], line[task]["half_width"]
            cells.append(f"{scale * value['mean']:.{digits}f}")
            margin = "" if half is None else f" ± {scale * half:.{digits}f}"
            is_first = line is found[0]
            cells.append("" if is_first else f"{scale * value['over_first']:+.{digits}f}{margin}")
        text.append(f"| {line['name']} | " + " | ".join(cells) + " |")
    guessed = [f"{100 * chance(task, length):.1f}" for task in TASKS[1:]]
    text.append(f"| chance | | | {guessed[0]} | | {guessed[1]} | |")
    return "\n".join(text) + "\n"


def write(found: list[Line], arguments: argparse.Namespace, what: str) -> None:
    """The record, the table beside it, and the table on the screen."""
    output: Path = arguments.output
    record = {
        "what": what,
        "command": arguments.command,
        "checkpoint": checkpoint_digest(SMALL),
        "machine": machine(),
        "length": arguments.length,
        "documents_per_task": arguments.rows,
        "rows": found,
    }
    write_json(output.with_suffix(".json"), record)
    write_whole(output.with_suffix(".md"), table(found, arguments.length))
    print(table(found, arguments.length))
    print(f"{ABOUT}\n\nwritten to {output.with_suffix('.json')} and .md")


def options(parser: argparse.ArgumentParser) -> None:
    """Those that ``similarity`` has too."""
    parser.add_argument("--rows", type=int, default=24, help="held-out documents of each task")
    parser.add_argument("--length", type=int, default=512, help="tokens of a document")
    parser.add_argument("--text-characters", type=int, default=TEXT_CHARACTERS)


def main(argv: list[str] | None = None) -> None:
    """Score and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pattern", nargs="+", default=PATTERNS, help="the first is the base")
    options(parser)
    arguments = read_arguments(
        parser, "training_free", argv, {**QUICK, "pattern": ["full", "uniform:1/4", "1/4"]}
    )
    found = lines(
        SMALL, arguments.pattern, arguments.rows, arguments.length, arguments.text_characters
    )
    write(found, arguments, "the paper's Table 2 in small: patterns without training")


if __name__ == "__main__":
    main()
