"""The appendix's heatmap: how much of their top-k every two layers have in common.

    python -m benchmarks.paper.heatmap --quick
    python -m benchmarks.paper.heatmap --model CHECKPOINT --data chats.jsonl

The blocks of the 1/4 pattern are drawn on it. Without ``--model``, the small trained model on this
machine's source code. Writes the folder overlap.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.paper import SMALL, indexcache
from benchmarks.records import read_arguments


def main(argv: list[str] | None = None) -> None:
    """Measure and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=SMALL)
    parser.add_argument("--data", default="machine")
    parser.add_argument("--pattern", default="1/4")
    parser.add_argument("--batches", type=int, default=32)
    arguments = read_arguments(parser, "overlap", argv, {"batches": 2})
    indexcache(
        *("search", "overlap", "--model", arguments.model, "--data", arguments.data),
        *("--pattern", arguments.pattern, "--batches", str(arguments.batches)),
        *("--output", arguments.output),
    )


if __name__ == "__main__":
    main()
