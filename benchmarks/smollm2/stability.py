"""Ask how far one pass's patterns hang on the calibration texts, and on what a list can miss.

    python -m benchmarks.smollm2.stability runs/smollm2/built

Rows of two books, at several lengths and list sizes: the F layers that the mean matrix of a set
chooses, and those that each of its rows alone chooses. Nothing is measured on other texts. Writes
smollm2/stability.json and its table.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from benchmarks.records import markdown, read_arguments
from benchmarks.smollm2 import model_parser
from benchmarks.smollm2.books import SEARCH, TRAIN, Books, Row, rows
from benchmarks.smollm2.evaluator import LeanEvaluator
from benchmarks.smollm2.lean import Lean
from benchmarks.smollm2.workers import each, one_thread
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.evaluators import Floats
from sglang_indexcache.search.methods.pairwise import most_similar
from sglang_indexcache.search.rules import Constraints, parse_targets
from sglang_indexcache.study.provenance import checkpoint_digest, machine
from sglang_indexcache.support.files import write_json, write_whole

QUICK = {"sizes": ["1024/64"], "rows": 1}
RATIOS = ("1/4", "1/8")


def kept_mass(model: Lean, numbered: tuple[int, Row]) -> tuple[int, Floats]:
    """Return a row's number and its ``[N, N]`` matrix of one pass, at the model's list size."""
    number, row = numbered
    return number, LeanEvaluator(model, [row], "mixed").kept_mass(0)


def chosen(matrix: Floats, model: Lean) -> dict[str, list[int]]:
    """Return the F layers of the best pattern by a matrix, at each retention."""
    rules = Constraints.make(Pattern.full(model.layers))
    marks = parse_targets(list(RATIOS), rules).marks
    return {m.label: list(most_similar(matrix, m.full_layers, rules).full_layers) for m in marks}


def main(argv: list[str] | None = None) -> None:
    """Choose, write."""
    one_thread()
    parser = model_parser(__doc__)
    parser.add_argument("--rows", type=int, default=4, help="of each set")
    parser.add_argument(
        "--sizes",
        nargs="+",
        metavar="TOKENS/LIST",
        default=["1024/64", "1024/128", "2048/64", "2048/128", "2048/256"],
    )
    arguments = read_arguments(parser, "smollm2/stability", argv, QUICK)
    from transformers import AutoTokenizer

    model = Lean.of_study(arguments)
    books = Books(arguments.cache, AutoTokenizer.from_pretrained(arguments.model))
    sets: list[dict[str, Any]] = []
    for book in (*SEARCH, *TRAIN):
        for size in arguments.sizes:
            length, model.topk = map(int, size.split("/"))
            numbered = enumerate(rows(books, (book,), arguments.rows, length))
            by_row = dict(each(partial(kept_mass, model), numbered, model.device.type))
            matrices = [by_row[number] for number in sorted(by_row)]
            together = chosen(np.mean(matrices, axis=0), model)
            alone = [chosen(matrix, model) for matrix in matrices]
            sets.append({"book": book, "size": size, "together": together, "alone": alone})
            print(book, size, together, flush=True)
    record = {
        "command": arguments.command,
        "checkpoint": checkpoint_digest(arguments.model),
        "machine": machine(),
        "sets": sets,
    }
    write_json(arguments.output.with_suffix(".json"), record)
    lines = [
        (
            *(entry["book"], entry["size"]),
            *(" ".join(map(str, entry["together"][ratio])) for ratio in RATIOS),
            "; ".join(" ".join(map(str, layers["1/8"])) for layers in entry["alone"]),
        )
        for entry in sets
    ]
    text = markdown(("book", "tokens/list", "1/4", "1/8", "1/8 of each row alone"), lines)
    page = f"Written by `{record['command']}`.\n\n{text}\n"
    write_whole(arguments.output.with_suffix(".md"), page)
    print(page)


if __name__ == "__main__":
    main()
