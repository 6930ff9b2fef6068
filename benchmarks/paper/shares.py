"""The introduction's figure: which share of the time goes to the indexers, by context.

    python -m benchmarks.paper.shares --quick
    python -m benchmarks.paper.shares --model /models/GLM-5-FP8 --context 10K 60K 200K -- --tp 8

Table 1 with every indexer on and nothing else. Without ``--model``, a small model with random
weights on this machine's CPU. Writes the folder shares.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.paper import table_1
from benchmarks.records import read_arguments


def main(argv: list[str] | None = None) -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a checkpoint's folder")
    parser.add_argument("--context", nargs="+", default=table_1.CONTEXTS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("server_flags", nargs="*", default=[], metavar="-- FLAGS")
    arguments = read_arguments(parser, "shares", argv, table_1.QUICK)
    model = ["--model", str(arguments.model)] if arguments.model else []
    table_1.main(
        [
            *("--pattern", "full", "--output", str(arguments.output), *model),
            *("--rounds", str(arguments.rounds), "--new-tokens", str(arguments.new_tokens)),
            *("--context", *arguments.context, "--", *arguments.server_flags),
        ]
    )


if __name__ == "__main__":
    main()
