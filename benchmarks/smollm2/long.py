"""Ask patterns that were searched on short texts at other lengths, with other lists.

    python -m benchmarks.smollm2.long runs/smollm2/built SEARCHED.json --lengths 4096 8192

The patterns are those of a record of ``benchmarks.smollm2.searched``, the blind ones among them;
nothing is searched again. Every one is measured on held-out books beside all F with lists of the
same size. Writes smollm2/long.json, its tables, and recall against the length as a figure.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.records import markdown, read_arguments
from benchmarks.smollm2 import model_parser
from benchmarks.smollm2.books import HELD_OUT, Books, rows
from benchmarks.smollm2.lean import Lean
from benchmarks.smollm2.measure import HEADER, Arm, Line, columns, compared, measure
from benchmarks.smollm2.searched import RATIOS, SHOWN
from benchmarks.smollm2.workers import one_thread
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.study.plots import make_figure, save_figure
from sglang_indexcache.study.provenance import checkpoint_digest, machine
from sglang_indexcache.support.files import write_json, write_whole

QUICK = {"lengths": [2048], "topks": [128], "rows": 2}

Cell = dict[str, Any]
"""One length and list: ``length``, ``topk``, and ``lines``, all F first."""


def arms(searched: Iterable[Path], topk: int) -> list[Arm]:
    """Return the arms of records of ``searched``, all F first, each name once."""
    lines = [line for path in searched for line in json.loads(path.read_text())["lines"]]
    patterns = {line["name"]: line["pattern"] for line in lines}
    return [Arm(name, Pattern(pattern), topk) for name, pattern in patterns.items()]


def table(cells: Iterable[Cell]) -> str:
    """Tabulate each line beside all F of its cell."""
    rows: list[tuple[object, ...]] = []
    for cell in cells:
        base, *lines = cell["lines"]
        for line in (base, *lines):
            about = (f"{cell['length']:,}", cell["topk"], line["name"], line["pattern"].count("F"))
            rows.append((*about, *columns(line, base)))
    return markdown(("tokens", "list", "pattern", "F", *HEADER), rows)


def draw(record: Mapping[str, Any], path: Path) -> None:
    """Draw what each way to choose F layers changes of recall, by length, a panel a retention."""
    cells: list[Cell] = record["cells"]
    topks = sorted({cell["topk"] for cell in cells})
    figure, axes = make_figure(9.6, 3.0 * len(topks), rows=len(topks), columns=len(RATIOS))
    for place, axis in enumerate(axes):
        topk, ratio = topks[place // len(RATIOS)], RATIOS[place % len(RATIOS)]
        ways: dict[str, list[tuple[int, float, float]]] = {}
        for cell in (cell for cell in cells if cell["topk"] == topk):
            base, *lines = cell["lines"]
            for line in (line for line in lines if line["name"].split()[0] == ratio):
                change, margin = compared(line, base, "recall")
                point = cell["length"], 100 * change, 100 * (margin or 0.0)
                ways.setdefault(_way(line), []).append(point)
        for name in (kind for kind in SHOWN if kind in ways):
            lengths, changes, margins = zip(*sorted(ways[name]), strict=True)
            axis.errorbar(
                lengths, changes, margins, marker="o", ms=4, lw=1.2, capsize=2, label=SHOWN[name]
            )
        axis.axhline(0, color="black", lw=0.8)
        axis.set_xscale("log", base=2)
        axis.set_xticks(sorted({cell["length"] for cell in cells}))
        axis.get_xaxis().set_major_formatter("{x:,.0f}")
        axis.set_title(f"{ratio} of the indexers, lists of {topk}", loc="left", fontsize=9)
    axes[0].set_ylabel("recall against all F, points", fontsize=8)
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False
    )
    save_figure(figure, path)


def _way(line: Line) -> str:
    """Return how a line's F layers were chosen, a key of :data:`SHOWN`."""
    return str(line["name"].partition(" ")[2].partition(":")[0])


def main(argv: list[str] | None = None) -> None:
    """Measure, write."""
    one_thread()
    parser = model_parser(__doc__)
    parser.add_argument("searched", type=Path, nargs="+", help="records of the searches")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--topks", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--rows", type=int, default=16)
    arguments = read_arguments(parser, "smollm2/long", argv, QUICK)
    from transformers import AutoTokenizer

    model = Lean.of_study(arguments)
    books = Books(arguments.cache, AutoTokenizer.from_pretrained(arguments.model))
    digest = checkpoint_digest(arguments.model)
    record: dict[str, Any] = {
        "what": "patterns that were searched on short texts, asked at other lengths and lists",
        "command": arguments.command,
        "checkpoint": digest,
        "machine": machine(),
        "books": HELD_OUT,
        "intervals": "t, 95 %, over rows; differences are paired by row",
        "cells": [],
    }
    for length in arguments.lengths:
        chosen = rows(books, HELD_OUT, arguments.rows, length)
        for topk in arguments.topks:
            every = arms(arguments.searched, topk)
            lines = measure(model, every, chosen, arguments.cache, digest, print)
            record["cells"].append({"length": length, "topk": topk, "lines": lines})
            # After each, so that what is interrupted has its finished cells.
            write_json(arguments.output.with_suffix(".json"), record)
    table_text = table(record["cells"])
    page = f"Written by `{record['command']}`.\n\n{table_text}\n"
    write_whole(arguments.output.with_suffix(".md"), page)
    draw(record, arguments.output.with_suffix(".png"))
    print(table_text)


if __name__ == "__main__":
    main()
