r"""Table 1 and the speed-up figure: prefill and decode at 1/2 and 1/4 against every indexer.

    python -m benchmarks.paper.table_1 --quick
    python -m benchmarks.paper.table_1
    python -m benchmarks.paper.table_1 --model /models/GLM-5-FP8 --pattern full 1/2 1/4 \
        --context 10K 60K 120K 200K -- --tp 8 --dp 8 --enable-dp-attention

Without ``--model`` this machine's CPU serves a small model with random weights, and only ratios
mean anything. What follows ``--`` goes to the servers. Writes the folder latency/cpu.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.paper import indexcache, repeated
from benchmarks.records import RUNS, read_arguments

NAME = "latency/cpu"
PATTERNS = ["full", "1/2=uniform:1/2", "1/4=uniform:1/4"]
CONTEXTS = ["1024", "4096", "8192", "16384"]
QUICK = {"context": ["1024", "4096"], "rounds": 1, "new_tokens": 16}
SHAPE = ["--size", "small", "--field", "num_hidden_layers=4", "--field", "index_n_heads=6"]
ON_A_CPU = ["--max-total-tokens", "33536", "--disable-overlap-schedule"]


def options(parser: argparse.ArgumentParser) -> None:
    """Those that ``shares`` has too."""
    parser.add_argument("--model", type=Path, help="a checkpoint's folder")
    parser.add_argument("--context", nargs="+", default=CONTEXTS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("server_flags", nargs="*", default=[], metavar="-- FLAGS")


def main(argv: list[str] | None = None) -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pattern", nargs="+", default=PATTERNS)
    options(parser)
    arguments = read_arguments(parser, NAME, argv, QUICK)
    model, flags, note = arguments.model, arguments.server_flags, f"{arguments.command}."
    if model is None:
        model, flags = RUNS / "dsa-4-small", flags or ON_A_CPU
        indexcache("demo", "model", *SHAPE, "--output", model)
        note += f" Checkpoint: indexcache demo model {' '.join(SHAPE)}, random weights."
    indexcache(
        *("bench", "latency", "--model", model, "--output", arguments.output, "--side-by-side"),
        *("--rounds", str(arguments.rounds), "--new-tokens", str(arguments.new_tokens)),
        *repeated("--pattern", arguments.pattern),
        *repeated("--context", arguments.context),
        *("--note", note, "--", *flags),
    )


if __name__ == "__main__":
    main()
