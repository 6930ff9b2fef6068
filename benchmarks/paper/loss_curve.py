"""The loss curve of a search: what each indexer that goes adds, and where it becomes dear.

    python -m benchmarks.paper.loss_curve --quick
    python -m benchmarks.paper.loss_curve --method greedy
    python -m benchmarks.paper.loss_curve --model CHECKPOINT --url URL --data chats.jsonl

``--method greedy`` is the paper's Algorithm 1; the default takes a fraction of its evaluations.
Without ``--model``, the small trained model in transformers. Writes the folder loss_curve.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.paper import SMALL, indexcache, repeated
from benchmarks.records import read_arguments

QUICK = {"batches": 4, "held_out": 2}


def main(argv: list[str] | None = None) -> None:
    """Search."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=SMALL)
    parser.add_argument("--url", nargs="+", default=[], help="servers in live mode")
    parser.add_argument("--data", default="machine")
    parser.add_argument("--method", default="fast")
    parser.add_argument("--batches", type=int, default=16)
    parser.add_argument("--held-out", type=int, default=8)
    arguments = read_arguments(parser, "loss_curve", argv, QUICK)
    indexcache(
        *("search", "run", "--model", arguments.model, "--data", arguments.data),
        *("--method", arguments.method, "--output", arguments.output),
        *("--batches", str(arguments.batches), "--held-out", str(arguments.held_out)),
        *repeated("--url", arguments.url),
    )


if __name__ == "__main__":
    main()
