"""Table 2 in small and the appendix's similarity search: patterns without training.

    python -m benchmarks.paper.table_2 --quick
    python -m benchmarks.paper.table_2

The small trained model answers held-out documents under each pattern, in transformers; all F of the
same document is what each is compared with. At each ratio there is the interleaved pattern, the one
whose F layers' attention outputs resemble most what the S layers would have had (appendix
"Similarity-based Pattern Search"), and the library's, which was searched by its loss. On a model of
yours the same question is asked by ``indexcache eval run``, with a margin and a verdict. Writes
training_free.json and .md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.paper import SMALL
from benchmarks.records import estimate, markdown, read_arguments
from benchmarks.training.batches import TEXT
from benchmarks.training.scores import Scorer
from benchmarks.training.tasks import TEXT_CHARACTERS, chance
from sglang_indexcache.lab.runs.provenance import machine
from sglang_indexcache.lab.search.evaluators.hf import TransformersEvaluator
from sglang_indexcache.lab.search.ledger import Ledger
from sglang_indexcache.lab.search.methods import SIMILARITY
from sglang_indexcache.lab.search.methods.pairwise import most_similar, pair_matrix
from sglang_indexcache.lab.search.rules import Constraints, parse_targets
from sglang_indexcache.lab.search.setup import Setup
from sglang_indexcache.lab.stats.bounds import half_width
from sglang_indexcache.library.digest import checkpoint_digest
from sglang_indexcache.library.writing import write_json, write_whole

TASKS = (TEXT, "recall", "needles")
RATIOS = ("1/2", "1/4", "1/8")
QUICK = {"rows": 2, "text_characters": 400_000, "batches": 2, "ratios": ["1/4"]}

Line = dict[str, Any]


def patterns(ratios: Sequence[str], batches: int) -> dict[str, str]:
    """Return what is compared, by what the table calls it; all F first."""
    setup = Setup.read(SMALL, batches=batches)
    rules = Constraints.make(setup.checkpoint.own)
    ledger = Ledger(TransformersEvaluator(SMALL, setup.calibration))
    matrix = pair_matrix(ledger, SIMILARITY)
    named = {"all F": "full"}
    for mark in parse_targets(list(ratios), rules).marks:
        ratio = mark.label
        similar = str(most_similar(matrix, mark.full_layers, rules))
        named |= {f"{ratio} interleaved": f"uniform:{ratio}", f"{ratio} by similarity": similar}
        named[f"{ratio} searched"] = ratio
    return named


# -- scored ------------------------------------------------------------------------------------


def score_patterns(
    arms: dict[str, str], rows: int, length: int, text_characters: int
) -> list[Line]:
    """Score each pattern; the first is what the others are compared with, by document."""
    lines: list[Line] = []
    for name, pattern in arms.items():
        scorer = Scorer(SMALL, pattern, text_characters)
        tasks = scorer.scores(length, rows, tasks=TASKS)["tasks"]
        values = {task: tasks[task]["per_row"] for task in TASKS}
        base = lines[0]["documents"] if lines else values
        line: Line = {"name": name, "pattern": str(scorer.pattern), "documents": values}
        for task in TASKS:
            over = [mine - its for mine, its in zip(values[task], base[task], strict=True)]
            line[task] = {
                "mean": sum(values[task]) / rows,
                "over_first": sum(over) / rows,
                "half_width": half_width(over),
            }
        lines.append(line)
        print(name, {task: round(line[task]["mean"], 3) for task in TASKS}, flush=True)
    return lines


def table(lines: list[Line], length: int) -> str:
    """Tabulate each task and what the pattern adds to it; 95 % intervals over documents."""
    header = ("text loss, nats", "added", "recall, %", "added", "needles, %", "added")
    rows = []
    for line in lines:
        cells = []
        for task in TASKS:
            scale, value = 1 if task == TEXT else 100, line[task]
            over = estimate(value["over_first"], value["half_width"], scale)
            cells += [estimate(value["mean"], None, scale, sign="")]
            cells += ["" if line is lines[0] else over]
        rows.append((f"{line['name']} `{line['pattern']}`", *cells))
    recall, needles = (f"{100 * chance(task, length):.1f}" for task in TASKS[1:])
    rows.append(("chance", "", "", recall, "", needles, ""))
    return markdown(("pattern", *header), rows)


def main(argv: list[str] | None = None) -> None:
    """Score and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ratios", nargs="+", default=list(RATIOS))
    parser.add_argument("--batches", type=int, default=16, help="documents of the similarity")
    parser.add_argument("--rows", type=int, default=24, help="held-out documents of each task")
    parser.add_argument("--length", type=int, default=512, help="tokens of a document")
    parser.add_argument("--text-characters", type=int, default=TEXT_CHARACTERS)
    arguments = read_arguments(parser, "training_free", argv, QUICK)
    output: Path = arguments.output
    arms = patterns(arguments.ratios, arguments.batches)
    lines = score_patterns(arms, arguments.rows, arguments.length, arguments.text_characters)
    record = {
        "what": "the paper's Table 2 and similarity search in small: patterns without training",
        "command": arguments.command,
        "checkpoint": checkpoint_digest(SMALL),
        "machine": machine(),
        "length": arguments.length,
        "documents_per_task": arguments.rows,
        "rows": lines,
    }
    write_json(output.with_suffix(".json"), record)
    write_whole(output.with_suffix(".md"), table(lines, arguments.length))
    print(table(lines, arguments.length))
    print(f"written to {output.with_suffix('.json')} and .md")


if __name__ == "__main__":
    main()
