"""The appendix's similarity search in small: local similarity is no better than interleaving.

    python -m benchmarks.paper.similarity --quick
    python -m benchmarks.paper.similarity

``indexcache search run --method similarity`` picks the F layers whose attention outputs resemble
most what the S layers would have had. Its patterns stand beside interleaved ones and the library's,
which were searched by their loss. Writes similarity.json and .md.
"""

from __future__ import annotations

import argparse
import json

from benchmarks.paper import SMALL, indexcache, repeated
from benchmarks.paper.table_2 import QUICK, lines, options, write
from benchmarks.records import RUNS, read_arguments

RATIOS = ["1/2", "1/4"]


def main(argv: list[str] | None = None) -> None:
    """Search, score and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=16, help="documents to search on")
    options(parser)
    arguments = read_arguments(parser, "similarity", argv, {**QUICK, "batches": 4})
    work = RUNS / f"similarity.work-{arguments.batches}"
    indexcache(
        *("search", "run", "--model", SMALL, "--output", work, "--method", "similarity"),
        *("--batches", str(arguments.batches), "--held-out", "0"),
        *repeated("--target", RATIOS),
    )
    marks = json.loads((work / "search.json").read_text())["marks"]
    similar = {mark["retention"]: mark["pattern"] for mark in marks}
    patterns = ["full"]
    for ratio in RATIOS:
        patterns += [f"uniform:{ratio}", similar[ratio], ratio]
    found = lines(SMALL, patterns, arguments.rows, arguments.length, arguments.text_characters)
    for line in found:
        for ratio, pattern in similar.items():
            if line["name"] == pattern:
                line["name"] = f"{ratio} by similarity"
    write(found, arguments, "the appendix's similarity search in small")


if __name__ == "__main__":
    main()
