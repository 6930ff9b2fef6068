"""Ask which matrix of layer pairs sees what copying needs, on SmolLM2.

    python -m benchmarks.smollm2.one_pass runs/smollm2/built

Each source says of every two layers how well the later does with the earlier one's list: the cosine
similarity of attention outputs (the paper's), the overlap of the lists, the same less the places
copied from that are lost (``lists``, all that a server shows), the attention mass that a list
captures as a mean over heads or as the head that loses most, over the text or at the repeated
passages only. The same dynamic programme makes a pattern of each at 1/2, 1/4 and 1/8; then text
loss and recall are measured on books that nothing was searched on. Writes smollm2/one_pass.json,
its table, and the first source's matrix with the blocks of its 1/4.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.records import read_arguments
from benchmarks.smollm2.books import HELD_OUT, SEARCH, Books, Row, rows
from benchmarks.smollm2.evaluator import LeanEvaluator
from benchmarks.smollm2.lean import Lean
from benchmarks.smollm2.measure import Arm, measure
from benchmarks.smollm2.searched import RATIOS, conditions, study_parser, write_study
from benchmarks.smollm2.workers import one_thread
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.evaluators import Floats
from sglang_indexcache.search.evaluators.hf import lost_by_worst_head
from sglang_indexcache.search.methods.pairwise import most_similar
from sglang_indexcache.search.overlap import draw_overlap
from sglang_indexcache.search.rules import Constraints, parse_targets
from sglang_indexcache.study.provenance import checkpoint_digest

WORST = "worst head, passages"
SOURCES = (WORST, "worst head, both", "worst head, text", "mean of heads, passages", "output")
OTHERS = ("mean of heads, both", "mean of heads, text", "overlap", "lists")
QUICK = {"batches": 1, "rows": 2, "length": 1024, "sources": [WORST, "output"]}
SCORES = {"passages": "recall", "text": "text"}


def matrices(model: Lean, row: Row) -> dict[str, Floats]:
    """Return each source's ``[N, N]`` float64: how well layer i does with layer j's list, j < i."""
    by_score = {where: LeanEvaluator(model, [row], score) for where, score in SCORES.items()}
    mass = {where: evaluator.mass(0) for where, evaluator in by_score.items()}
    text_places, repeated = len(row.text), len(row.recall)
    mass["both"] = (text_places * mass["text"] + repeated * mass["passages"]) / (
        text_places + repeated
    )
    named = {f"worst head, {where}": lost_by_worst_head(matrix) for where, matrix in mass.items()}
    named |= {f"mean of heads, {where}": matrix.mean(axis=2) for where, matrix in mass.items()}
    named["lists"] = LeanEvaluator(model, [row], "mixed").kept_list(0)
    anywhere = by_score["text"]
    return named | {"output": anywhere.similarity(0), "overlap": anywhere.overlap(0)}


def main(argv: list[str] | None = None) -> None:
    """Make matrices and patterns, measure, write."""
    one_thread()
    parser = study_parser(__doc__)
    parser.add_argument("--sources", nargs="+", choices=SOURCES + OTHERS, default=list(SOURCES))
    arguments = read_arguments(parser, "smollm2/one_pass", argv, QUICK)
    from transformers import AutoTokenizer

    model = Lean.of_study(arguments)
    books = Books(arguments.cache, AutoTokenizer.from_pretrained(arguments.model))
    rules = Constraints.make(Pattern.full(model.layers))
    model.topk = arguments.search_topk
    searched_on = rows(books, SEARCH, arguments.batches, arguments.search_length)
    by_row = []
    for number, row in enumerate(searched_on, 1):
        by_row.append(matrices(model, row))
        print(f"matrices of row {number} of {len(searched_on)}", flush=True)
    means = {
        name: np.mean([matrix[name] for matrix in by_row], axis=0) for name in arguments.sources
    }
    arms = [Arm("all F", Pattern.full(model.layers), arguments.topk)]
    for mark in parse_targets(list(RATIOS), rules).marks:
        arms += [
            Arm(
                f"{mark.label}, {name}",
                most_similar(matrix, mark.full_layers, rules),
                arguments.topk,
            )
            for name, matrix in means.items()
        ]
    chosen = rows(books, HELD_OUT, arguments.rows, arguments.length)
    digest = checkpoint_digest(arguments.model)
    lines = measure(model, arms, chosen, arguments.cache, digest, print)
    record = {
        "what": "patterns of SmolLM2 by one matrix of layer pairs: text loss and recall, held out",
        **conditions(arguments, digest),
        "matrices": {name: rounded(matrix) for name, matrix in means.items()},
        "lines": lines,
    }
    write_study(record, arguments.output)
    draw(record, arguments.output.with_suffix(".png"))


def draw(record: Mapping[str, Any], path: Path) -> None:
    """Draw the first source's matrix with the blocks of its 1/4."""
    source, matrix = next(iter(record["matrices"].items()))
    [pattern] = (line["pattern"] for line in record["lines"] if line["name"] == f"1/4, {source}")
    draw_overlap(
        np.array(matrix), path, Pattern(pattern), f"how a layer does with another's list ({source})"
    )


def rounded(matrix: Floats) -> list[list[float]]:
    """Return a matrix for JSON, to four digits."""
    return [[round(float(value), 4) for value in row] for row in matrix]


if __name__ == "__main__":
    main()
