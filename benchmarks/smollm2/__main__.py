"""Build the model, or measure one that was built.

    python -m benchmarks.smollm2 build [--base WHEEL] [--variant random] [--output FOLDER]
    python -m benchmarks.smollm2 measure [FOLDER] [--lengths 1024 2048 4096 8192] [--rows 8]

``build`` ends with a quick table. ``measure`` gives the whole one: loss and recall of SmolLM2
itself, of the converted form with dense attention, and of the DSA form at three values of
``index_topk``. What may be lost by conversion is 1 % of perplexity and 3 points of recall.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.records import markdown, read_arguments
from benchmarks.smollm2 import CACHE
from benchmarks.smollm2.books import HELD_OUT, SOURCES, Books, rows
from benchmarks.smollm2.build import VARIANTS, build
from benchmarks.smollm2.lean import Lean
from benchmarks.smollm2.measure import HEADER, Arm, Line, columns, full, measure
from benchmarks.smollm2.workers import one_thread
from sglang_indexcache.lab.runs.provenance import machine
from sglang_indexcache.library.digest import checkpoint_digest
from sglang_indexcache.library.writing import write_json

TOPKS = (128, 256, 512)
QUICK = {"lengths": [1024], "topks": [128], "rows": 2}
_STARTED = time.monotonic()


def table(cells: list[dict[str, Any]]) -> str:
    """Tabulate every line beside SmolLM2 itself at the same length."""
    rows = []
    for cell in cells:
        for line in cell["lines"]:
            rows.append((cell["length"], line["name"], *columns(line, cell["lines"][0])))
    return markdown(("tokens", "form", *HEADER), rows)


def measured(
    folder: Path, cache: Path, lengths: list[int], topks: list[int], count: int, device: str
) -> list[dict[str, Any]]:
    """Return for each length its lines, SmolLM2 itself first."""
    from transformers import AutoTokenizer

    model = Lean(folder, device=device)
    books = Books(cache, AutoTokenizer.from_pretrained(folder))
    arms = [Arm("SmolLM2", original=True), Arm("converted, dense")]
    arms += [Arm(f"DSA, index_topk {topk}", full(model), topk) for topk in topks]
    digest = checkpoint_digest(folder)
    cells = []
    for length in lengths:
        chosen = rows(books, HELD_OUT, count, length)
        lines: list[Line] = measure(model, arms, chosen, cache, digest, _say)
        cells.append({"length": length, "lines": lines})
    return cells


def _say(text: str) -> None:
    print(f"[{time.monotonic() - _STARTED:5.0f} s] {text}", flush=True)


def main(argv: list[str] | None = None) -> None:
    """Build or measure."""
    one_thread()
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.smollm2", description=__doc__)
    parser.add_argument("action", choices=("build", "measure"))
    parser.add_argument("folder", nargs="?", type=Path, help="default: below the cache")
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--base", type=Path, help="the wheel or the GGUF file, or their folder")
    parser.add_argument("--variant", choices=VARIANTS, default="built")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--topks", type=int, nargs="+", default=list(TOPKS))
    parser.add_argument("--rows", type=int, default=8, help="of each length")
    arguments = read_arguments(parser, "smollm2/forms", words, QUICK)
    folder: Path = arguments.folder or arguments.cache / arguments.variant
    report: list[dict[str, Any]] = []
    if arguments.action == "build":
        variant = VARIANTS[arguments.variant]
        report = build(
            folder, arguments.cache, variant, arguments.base, _say, device=arguments.device
        )
        arguments.lengths, arguments.topks, arguments.rows = [1024], [128], 2
    sizes = arguments.lengths, arguments.topks, arguments.rows
    cells = measured(folder, arguments.cache, *sizes, arguments.device)
    record = {
        "what": "text loss and recall of SmolLM2, its converted form, and its DSA form",
        "command": arguments.command,
        "checkpoint": checkpoint_digest(folder),
        "machine": machine(),
        "books": {name: vars(SOURCES[name]) for name in HELD_OUT},
        "intervals": "t, 95 %, over rows; differences are paired by row",
        "indexers": report,
        "cells": cells,
    }
    write_json(arguments.output.with_suffix(".json"), record)
    print(table(cells))


if __name__ == "__main__":
    main()
