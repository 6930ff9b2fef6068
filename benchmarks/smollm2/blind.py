"""Measure patterns that nobody searched: Table 2's uniform rows, and SGLang's.

    python -m benchmarks.smollm2.blind runs/smollm2/dsa

Rows of 4Ki of held-out books under all F, the paper's uniform patterns and SGLang's frequency
schedule, each at two values of ``index_topk``. Writes smollm2/blind.json.
"""

from __future__ import annotations

from benchmarks.records import markdown, read_arguments
from benchmarks.smollm2 import model_parser
from benchmarks.smollm2.books import HELD_OUT, Books, rows
from benchmarks.smollm2.lean import Lean
from benchmarks.smollm2.measure import HEADER, Arm, Line, columns, measure, named
from benchmarks.smollm2.workers import one_thread
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.study.provenance import checkpoint_digest, machine
from sglang_indexcache.support.files import write_json, write_whole

NAMES = ("1/4", "1/4 freq", "1/2", "1/2 freq", "1/8", "1/8 freq")
QUICK = {"rows": 2, "length": 1024, "names": ["1/4", "1/4 freq"], "topks": [128]}


def arms(names: list[str], topks: list[int], layers: int) -> list[Arm]:
    """Return the original and the dense form; then all F and each pattern per ``index_topk``."""
    arms_of_study = [Arm("original", original=True), Arm("dense")]
    for topk in topks:
        arms_of_study.append(Arm("all F", Pattern.full(layers), topk))
        arms_of_study += [
            Arm(name, pattern, topk) for name, pattern in named(names, layers).items()
        ]
    return arms_of_study


def table(lines: list[Line]) -> str:
    """Tabulate each line beside all F of its ``index_topk``."""
    cells = []
    for line in lines:
        base = next((x for x in lines if x["name"] == "all F" and x["topk"] == line["topk"]), None)
        base = base or next(x for x in lines if x["name"] == "all F")
        name = f"{line['name']}" + (f" `{line['pattern']}`" if line["pattern"] else "")
        cells.append((line["topk"] or "all", name, *columns(line, base)))
    return markdown(("index_topk", "pattern", *HEADER), cells)


def main(argv: list[str] | None = None) -> None:
    """Measure, write."""
    one_thread()
    parser = model_parser(__doc__)
    parser.add_argument("--names", nargs="+", default=list(NAMES))
    parser.add_argument("--topks", type=int, nargs="+", default=[128, 256])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=4096)
    arguments = read_arguments(parser, "smollm2/blind", argv, QUICK)
    from transformers import AutoTokenizer

    model = Lean.of_study(arguments)
    books = Books(arguments.cache, AutoTokenizer.from_pretrained(arguments.model))
    chosen = rows(books, HELD_OUT, arguments.rows, arguments.length)
    digest = checkpoint_digest(arguments.model)
    compared = arms(arguments.names, arguments.topks, model.layers)
    lines = measure(model, compared, chosen, arguments.cache, digest, print)
    record = {
        "what": "text loss and recall under patterns that nobody searched",
        "command": arguments.command,
        "checkpoint": digest,
        "machine": machine(),
        "books": HELD_OUT,
        "length": arguments.length,
        "intervals": "t, 95 %, over rows; differences are paired by row",
        "lines": lines,
    }
    write_json(arguments.output.with_suffix(".json"), record)
    text = f"Written by `{arguments.command}`.\n\n{table(lines)}\n"
    write_whole(arguments.output.with_suffix(".md"), text)
    print(table(lines))


if __name__ == "__main__":
    main()
