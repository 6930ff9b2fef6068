"""Search patterns on SmolLM2 and measure them on whole books that no pattern was chosen by.

    python -m benchmarks.smollm2.searched runs/smollm2/built
    python -m benchmarks.smollm2.searched runs/smollm2/built --searches greedy:mixed one-pass:text

The paper's Algorithm 1 (``greedy``), its similarity search and the package's own searches run on
rows of one book, by the loss of the text, of repeated passages, or of both (``mixed``); a search
that is interrupted goes on. Then every pattern that was found is
measured on held-out books beside all F, the paper's uniform patterns and SGLang's frequency
schedule. Writes smollm2/searched.json, its tables, what each pattern loses of recall as a figure,
the overlap of the layers' selections as a heatmap with the blocks of the first search's 1/4, and
the loss along Algorithm 1.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.records import markdown, read_arguments
from benchmarks.smollm2 import model_parser
from benchmarks.smollm2.books import HELD_OUT, SEARCH, Books, rows
from benchmarks.smollm2.evaluator import SCORES, LeanEvaluator
from benchmarks.smollm2.lean import Lean
from benchmarks.smollm2.measure import HEADER, Arm, Line, columns, compared, measure, named
from benchmarks.smollm2.workers import one_thread
from sglang_indexcache.lab.runs.plots import make_figure, save_figure
from sglang_indexcache.lab.runs.provenance import machine
from sglang_indexcache.lab.search.evaluators import Floats
from sglang_indexcache.lab.search.figure import draw_pairs
from sglang_indexcache.lab.search.ledger import Ledger, Step, open_journal
from sglang_indexcache.lab.search.methods import METHODS, find_method
from sglang_indexcache.lab.search.rules import Constraints, parse_targets
from sglang_indexcache.lab.search.run import Search
from sglang_indexcache.library.digest import checkpoint_digest
from sglang_indexcache.library.writing import write_json, write_whole
from sglang_indexcache.pattern import Pattern

RATIOS = ("1/2", "1/4", "1/8")
QUICK = {"searches": ["similarity:mixed"], "batches": 1, "rows": 2, "length": 1024}
SEARCHES = ("similarity:mixed", "one-pass:mixed", "proposals:mixed", "greedy:mixed")
DOWN = "greedy"
SHOWN = {
    "uniform": "evenly spaced",
    "freq": "SGLang's frequency",
    "greedy": "Algorithm 1",
    "similarity": "similarity",
    "proposals": "proposals, by KL",
    "one-pass": "one pass, worst head",
}
"""Ways to choose F layers, in the order and words of the figure."""


def search(
    evaluator: LeanEvaluator, method: str, journal: Path, digest: str, rules: Constraints
) -> dict[str, Any]:
    """Run one search of the package.

    Returns:
        The patterns by ratio, the steps, and the tokens that it asked for.
    """
    identity = {
        "checkpoint": digest,
        "evaluator": evaluator.kind,
        "rows": [row.digest for row in evaluator.rows],
        "length": evaluator.batch_tokens[0],
    }
    targets = parse_targets(list(RATIOS), rules)
    with open_journal(journal, identity) as opened:
        ledger = Ledger(evaluator, opened)
        run = Search(ledger, targets, find_method(method))
        for event in run.run():
            if isinstance(event, Step):
                left = len(event.pattern.full_layers)
                print(f"{method}: {left} F, {event.loss:.4f} nats, {event.pattern}", flush=True)
        tokens = run.search_tokens  # before what follows asks for more
        return {
            "method": method,
            "patterns": {mark.mark.label: str(mark.pattern) for mark in run.found.values()},
            "losses": {m.mark.label: ledger.mean(m.pattern) for m in run.found.values()},
            "steps": [
                {
                    "pattern": str(step.pattern),
                    "flipped": step.layer,
                    "loss": step.loss,
                }
                for step in run.path
            ],
            "tokens": tokens,
            "of_greedy": tokens / run.exhaustive,
        }


def overlap(evaluator: LeanEvaluator, batches: Sequence[int]) -> Floats:
    """Return the mean overlap of the layers' selections, ``[N, N]``."""
    return np.asarray(np.mean([evaluator.overlap(batch) for batch in batches], axis=0))


def arms(searches: Sequence[dict[str, Any]], topk: int, layers: int) -> list[Arm]:
    """Return all F, then at each ratio the blind patterns and what each search found."""
    arms_of_study = [Arm("all F", Pattern.full(layers), topk)]
    for ratio in RATIOS:
        blind = named((ratio, f"{ratio} freq"), layers)
        arms_of_study += [Arm(f"{ratio} {kind}", pattern, topk) for kind, pattern in zip(
            ("uniform", "freq"), blind.values(), strict=True)]  # fmt: skip
        arms_of_study += [
            Arm(f"{ratio} {entry['name']}", Pattern(entry["patterns"][ratio]), topk)
            for entry in searches
        ]
    return arms_of_study


def table(lines: list[Line]) -> str:
    """Tabulate each line beside all F."""
    rows = []
    for line in lines:
        count = line["pattern"].count("F")
        rows.append((line["name"], f"`{line['pattern']}`", count, *columns(line, lines[0])))
    return markdown(("", "pattern", "F", *HEADER), rows)


def draw_path(record: dict[str, Any], path: Path) -> None:
    """Draw the loss that each flip of Algorithm 1 leaves."""
    figure, [axis] = make_figure(7.2, 4.0)
    for entry in record["searches"]:
        steps = entry["steps"]
        if entry["method"] != DOWN or not steps:
            continue
        base = steps[0]["loss"]
        gone = [step["pattern"].count("S") for step in steps]
        added = [step["loss"] - base for step in steps]
        axis.plot(gone, added, marker="o", ms=3, lw=1.2, label=entry["name"])
    axis.axhline(0, color="black", lw=0.8, ls=":")
    axis.set_xlabel("layers without an indexer")
    axis.set_ylabel("loss added on the rows searched on, nats")
    axis.set_title(f"Algorithm 1 on {_model(record)}, each flip", fontsize=10)
    axis.legend(frameon=False, fontsize=8)
    save_figure(figure, path)


def draw_recall(record: dict[str, Any], path: Path) -> None:
    """Draw what each pattern changes of recall, by how many layers keep their indexer."""
    base, *lines = record["lines"]
    changes: dict[str, list[tuple[float, float, float]]] = {}
    for line in lines:
        ratio, _, kind = line["name"].partition(" ")
        change, margin = compared(line, base, "recall")
        place = RATIOS.index(ratio), 100 * change, 100 * (margin or 0.0)
        changes.setdefault(kind.partition(":")[0], []).append(place)
    figure, [axis] = make_figure(7.2, 4.0)
    ways = [name for name in SHOWN if name in changes]
    for number, kind in enumerate(ways):
        ratio_numbers, values, margins = zip(*changes[kind], strict=True)
        aside = 0.11 * (number - (len(ways) - 1) / 2)
        places = [ratio_number + aside for ratio_number in ratio_numbers]
        axis.errorbar(places, values, margins, fmt="o", ms=5, capsize=2, label=SHOWN[kind])
    axis.axhline(0, color="black", lw=0.8)
    counts = {line["name"].split()[0]: line["pattern"].count("F") for line in lines}
    layers = base["pattern"].count("F")
    axis.set_xticks(
        range(len(RATIOS)), [f"{ratio}: {counts[ratio]} of {layers} indexers" for ratio in RATIOS]
    )
    axis.set_ylabel("recall against all indexers, points")
    asked = f"{len(base['rows'])} held-out rows of {record['measured']['length']:,} tokens"
    axis.set_title(f"{_model(record)}, {asked}", fontsize=10, loc="left")
    figure.legend(frameon=False, fontsize=8, ncols=3, loc="outside lower center")
    save_figure(figure, path)


def study_parser(description: str | None) -> argparse.ArgumentParser:
    """Return the options of a study that searches on some rows and measures on others."""
    parser = model_parser(description)
    parser.add_argument("--batches", type=int, default=4, help="rows that are searched on")
    parser.add_argument("--search-length", type=int, default=1024)
    parser.add_argument("--search-topk", type=int, default=64)
    parser.add_argument("--rows", type=int, default=8, help="held-out rows")
    parser.add_argument("--length", type=int, default=2048, help="of held-out rows")
    parser.add_argument("--topk", type=int, default=128)
    return parser


def conditions(arguments: argparse.Namespace, digest: str) -> dict[str, Any]:
    """Return what a record says of the options of :func:`study_parser`, and of this machine."""
    return {
        "command": arguments.command,
        "checkpoint": digest,
        "machine": machine(),
        "dtype": arguments.dtype,
        "books": {"searched on": SEARCH, "measured on": HELD_OUT},
        "batches": arguments.batches,
        "searched": {"length": arguments.search_length, "index_topk": arguments.search_topk},
        "measured": {"length": arguments.length, "index_topk": arguments.topk},
        "intervals": "t, 95 %, over rows; differences are paired by row",
    }


def write_study(record: dict[str, Any], output: Path) -> None:
    """Write a record beside its table, and print the table."""
    table_text = table(record["lines"])
    write_json(output.with_suffix(".json"), record)
    write_whole(output.with_suffix(".md"), f"Written by `{record['command']}`.\n\n{table_text}\n")
    print(table_text)


def main(argv: list[str] | None = None) -> None:
    """Search, measure, write."""
    one_thread()
    parser = study_parser(__doc__)
    choices = [f"{method}:{score}" for method in METHODS for score in SCORES]
    parser.add_argument("--searches", nargs="+", choices=choices, default=list(SEARCHES))
    arguments = read_arguments(parser, "smollm2/searched", argv, QUICK)
    from transformers import AutoTokenizer

    model = Lean.of_study(arguments)
    books = Books(arguments.cache, AutoTokenizer.from_pretrained(arguments.model))
    digest = checkpoint_digest(arguments.model)
    chosen = rows(books, HELD_OUT, arguments.rows, arguments.length)
    searched_on = rows(books, SEARCH, arguments.batches, arguments.search_length)
    rules = Constraints.make(Pattern.full(model.layers))
    searches, matrix = [], None
    in_flight = (os.cpu_count() or 1) if arguments.device == "cpu" else 1
    model.topk = arguments.search_topk
    for name in arguments.searches:
        method, _, score = name.partition(":")
        evaluator = LeanEvaluator(model, searched_on, score, in_flight)
        size = f"{len(searched_on)}-{arguments.search_length}-{model.topk}"
        journal = (
            arguments.cache / "searches" / f"{digest[:12]}-{arguments.dtype}-{score}-{size}.jsonl"
        )
        searches.append({"name": name, **search(evaluator, method, journal, digest, rules)})
        if matrix is None:
            matrix = overlap(evaluator, range(min(2, len(searched_on))))
    compared = arms(searches, arguments.topk, model.layers)
    lines = measure(model, compared, chosen, arguments.cache, digest, print)
    assert matrix is not None
    record = {
        "what": "searched and blind patterns on SmolLM2: text loss and recall on held-out books",
        **conditions(arguments, digest),
        "index_heads": model.index_heads,
        "searches": searches,
        "overlap": [[round(float(value), 4) for value in row] for row in matrix],
        "lines": lines,
    }
    write_study(record, arguments.output)
    draw(record, arguments.output.parent)


def draw(record: dict[str, Any], folder: Path) -> None:
    """Draw recall, the heatmap, and the way of Algorithm 1 where it was walked."""
    walked = any(entry["method"] == DOWN for entry in record["searches"])
    for name, draw_one in FIGURES.items():
        if walked or draw_one is not draw_path:
            draw_one(record, folder / f"{name}.png")


def draw_lists(record: dict[str, Any], path: Path) -> None:
    """Draw the overlap of the layers' selections with the blocks of the first search's 1/4."""
    pattern = Pattern(record["searches"][0]["patterns"]["1/4"])
    draw_pairs(np.array(record["overlap"]), path, pattern)


def _model(record: dict[str, Any]) -> str:
    """Return the model's name for a title; a record older than its heads is of the 9 copies."""
    return f"SmolLM2-135M with {record.get('index_heads', 9)} index heads a layer"


FIGURES = {"recall": draw_recall, "overlap": draw_lists, "algorithm_1": draw_path}
"""Figures of a record, by the name of their file."""


if __name__ == "__main__":
    main()
